"""Conversations of the playground: several samples, branches, one history for two models, what outlives a reload."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from .conftest import MODEL
from .test_playground import ask, choose


def address(path: str = f"model={MODEL}") -> str:
    return f"/console/playground?{path}"


def messages(page: Page, act) -> list[dict[str, str]]:
    """The messages of the request that an action sends."""
    with page.expect_request("**/v1/chat/completions") as sent:
        act()
    found: list[dict[str, str]] = json.loads(sent.value.post_data)["messages"]
    return found


def said(answer: Locator) -> str:
    return answer.locator(".prose").text_content() or ""


def ended(page: Page, count: int) -> None:
    expect(page.locator(".answer")).to_have_count(count)
    expect(page.locator(".answer[aria-busy]")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_several_samples_have_their_figures_and_the_chosen_one_goes_on(keyed, open_page):
    page = open_page(keyed.url, address(), key=keyed.key)
    choose(page, Samples="4", Temperature="1.5", Max_tokens="12", Seed="5")
    ask(page, "Tell me a story.")
    ended(page, 4)
    answers = page.locator(".answer")
    texts = [said(answers.nth(i)) for i in range(4)]
    assert len(set(texts)) > 1, "samples differ"
    for i in range(4):
        expect(answers.nth(i).locator(".figures")).to_contain_text(
            re.compile(r"\b\d+ tokens? · .*mean logprob -\d+\.\d\d · (ended|cut off)")
        )
    lengths = [int(re.search(r"(\d+) token", answers.nth(i).locator(".figures").inner_text())[1]) for i in range(4)]
    shown = [answers.nth(i).locator(".token").count() for i in range(4)]  # tokens of one character are one piece
    assert all(1 <= shown[i] <= lengths[i] <= 12 for i in range(4)) and len(set(lengths)) > 1
    expect(page.get_by_role("button", name="Goes on")).to_have_count(1)
    number = next(i for i in range(1, 4) if texts[i] not in ("", texts[0]))
    answers.nth(number).get_by_role("button", name="Go on with this").click()
    expect(answers.nth(number).get_by_role("button", name="Goes on")).to_have_attribute("aria-pressed", "true")
    choose(page, Samples="1")
    sent = messages(page, lambda: ask(page, "Go on."))
    assert [one["content"] for one in sent] == ["Tell me a story.", texts[number], "Go on."]
    ended(page, 2)  # of the earlier turn only the chosen answer is shown
    page.get_by_role("button", name="Show all 4").click()
    ended(page, 5)


@pytest.mark.parametrize("count", ["0", "17", "1.5"])
def test_a_wrong_number_of_samples_is_refused(keyed, open_page, count):
    page = open_page(keyed.url, address(), key=keyed.key)
    choose(page, Samples=count)
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("1 to 16 are accepted")
    expect(page.locator(".asked")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")


def test_edited_turns_are_branches_that_outlive_a_reload_and_an_export(keyed, open_page, tmp_path: Path):
    page = open_page(keyed.url, address(), key=keyed.key)
    choose(page, Temperature="0", Max_tokens="8")
    ask(page, "What is 2 + 3?")
    first = said(page.locator(".answer").first)
    ask(page, "Thank you.")
    page.get_by_role("button", name="Edit this prompt").first.click()
    page.get_by_label("Edited text").fill("What is 4 + 5?")
    sent = messages(page, lambda: page.get_by_label("Edited text").press("Control+Enter"))
    assert [one["content"] for one in sent] == ["What is 4 + 5?"], "a branch has the history before it"
    ended(page, 1)
    prompts = page.get_by_role("group", name="Prompts: branch")
    expect(prompts).to_contain_text("2 / 2")
    prompts.get_by_role("button", name="Previous branch").click()
    expect(page.locator(".asked .prose")).to_have_text(["What is 2 + 3?", "Thank you."])
    page.get_by_role("button", name="Edit this answer").first.click()
    page.get_by_label("Edited text").fill("It is seven.")
    page.get_by_role("button", name="Save as a branch").click()
    answers = page.get_by_role("group", name="Answers: branch")
    expect(answers).to_contain_text("2 / 2")
    expect(page.locator(".answer.edited .prose")).to_be_visible()
    assert said(page.locator(".answer").first) == "It is seven."
    sent = messages(page, lambda: ask(page, "Are you sure?"))
    assert [one["content"] for one in sent] == ["What is 2 + 3?", "It is seven.", "Are you sure?"]
    page.reload()
    check_tree(page, first)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "conversation.json"
    download.value.save_as(file)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".asked")).to_have_count(0)
    choose_file(page, file)
    check_tree(page, first)
    file.write_text(json.dumps({**json.loads(file.read_text()), "fork": {"turns": [{"prompt": 1}]}}))
    choose_file(page, file)
    expect(page.get_by_role("alert")).to_contain_text("fork.turns[0].prompt must be a text")


def choose_file(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(file)


def check_tree(page: Page, first: str) -> None:
    """All branches of the test above: the edited answer is shown, the first one and the other prompt are reachable."""
    expect(page.locator(".asked .prose")).to_have_text(["What is 2 + 3?", "Are you sure?"])
    page.get_by_role("group", name="Answers: branch").get_by_role("button", name="Previous branch").click()
    expect(page.locator(".asked .prose")).to_have_text(["What is 2 + 3?", "Thank you."])
    assert said(page.locator(".answer").first) == first
    expect(page.locator(".answer").first.locator(".token").first).to_be_visible()
    page.get_by_role("group", name="Prompts: branch").get_by_role("button", name="Next branch").click()
    expect(page.locator(".asked .prose")).to_have_text(["What is 4 + 5?"])
    page.get_by_role("group", name="Prompts: branch").get_by_role("button", name="Previous branch").click()
    page.get_by_role("group", name="Answers: branch").get_by_role("button", name="Next branch").click()
    expect(page.locator(".asked .prose")).to_have_text(["What is 2 + 3?", "Are you sure?"])


def test_try_again_keeps_the_earlier_answer(keyed, open_page):
    page = open_page(keyed.url, address(), key=keyed.key)
    choose(page, Max_tokens="6", Temperature="1.5")
    ask(page, "Tell me a story.")
    before = said(page.locator(".answer"))
    page.get_by_role("button", name="Try again").click()
    ended(page, 1)
    expect(page.get_by_role("group", name="Answers: branch 2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous branch").click()
    assert said(page.locator(".answer")) == before


def test_two_models_get_the_same_history_and_the_user_chooses_the_answer(keyed, open_page, watch):
    watch.expected.add(404)
    page = open_page(keyed.url, address(f"model={MODEL}&other={MODEL}"), key=keyed.key)
    expect(page.get_by_text("Both models get the same history")).to_be_visible()
    choose(page, Temperature="1.5", Max_tokens="8")
    ask(page, "Tell me a story.")
    ended(page, 2)
    texts = [said(page.locator(".answer").nth(i)) for i in range(2)]
    page.locator(".answer").nth(1).get_by_role("button", name="Go on with this").click()
    bodies: list[list[str]] = []
    page.on(
        "request", lambda request: bodies.append(contents(request.post_data)) if "/v1/chat" in request.url else None
    )
    ask(page, "Go on.")
    ended(page, 4)
    assert bodies == [["Tell me a story.", texts[1], "Go on."]] * 2
    page.get_by_label("Model", exact=True).fill("not/served")
    ask(page, "More.")
    ended(page, 6)
    last = page.locator(".play-turn").last
    expect(last.locator(".candidate.chosen .figures")).not_to_contain_text("failed")
    expect(last.get_by_role("alert")).to_contain_text("is not served here")


def contents(body: str | None) -> list[str]:
    return [one["content"] for one in json.loads(body or "")["messages"]]


def test_signing_out_forgets_the_conversation(keyed, open_page):
    page = open_page(keyed.url, address(), key=keyed.key)
    choose(page, Max_tokens="4")
    ask(page, "Hello")
    expect(page.get_by_role("button", name="Clear")).to_be_enabled()
    kept = "Object.keys(localStorage).filter((name) => name.startsWith('lorimer.conversation'))"
    assert len(page.evaluate(kept)) == 1
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate(kept) == []


def test_the_composer_stays_in_the_window(keyed, open_page):
    for phone in (False, True):
        page = open_page(keyed.url, address(), key=keyed.key, phone=phone)
        composer = page.locator(".composer")
        expect(composer).to_be_in_viewport(ratio=1)
        choose_open(page)
        expect(composer).to_be_in_viewport(ratio=1)
        choose(page, Samples="8", Temperature="1.5", Max_tokens="60")
        ask(page, "Tell me a story.")
        ended(page, 8)
        page.evaluate("scrollTo(0, 0)")
        expect(composer).to_be_in_viewport(ratio=1)
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(composer).to_be_in_viewport(ratio=1)
        last, box = page.locator(".answer").last.bounding_box(), composer.bounding_box()
        assert last["y"] + last["height"] <= box["y"] + 1, "the end of the last answer is not covered"
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def choose_open(page: Page) -> None:
    page.locator(".settings").evaluate("node => (node.open = true)")


def test_two_tabs_keep_their_own_conversations(server, open_page):
    first = open_page(server.url, address())
    choose(first, Max_tokens="4")
    ask(first, "Of the first tab.")
    ended(first, 1)
    second = first.context.new_page()
    second.goto(address())
    expect(second.get_by_text("Of the first tab.")).to_be_visible()  # a new tab begins where the last one is
    second.get_by_role("button", name="Clear").click()
    choose(second, Max_tokens="4")
    ask(second, "Of the second tab.")
    ended(second, 1)
    copied = first.context.new_page()  # as "Duplicate tab" does, with the storage of the session
    copied.add_init_script(
        f"sessionStorage.getItem('lorimer.tab') || "
        f"sessionStorage.setItem('lorimer.tab', {json.dumps(second.evaluate('sessionStorage.getItem(`lorimer.tab`)'))})"
    )
    copied.goto(address())
    expect(copied.get_by_text("Of the second tab.")).to_be_visible()
    choose(copied, Max_tokens="4")
    ask(copied, "Of the copy.")
    ended(copied, 2)
    for page, text in ((first, "Of the first tab."), (second, "Of the second tab."), (copied, "Of the copy.")):
        page.reload()
        expect(page.get_by_text(text)).to_be_visible()
    expect(second.get_by_text("Of the copy.")).to_have_count(0)
