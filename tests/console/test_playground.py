"""The playground: streamed answers, shaded tokens and their alternatives, two models side by side, hostile answers."""

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

import lorimer

from .conftest import MODEL, PLAIN

HOSTILE = '<img src=x onerror="document.title=1">'
QUESTION = "What is 2 + 3?"
ENDED = re.compile("ended|cut off|failed|stopped")
GROWTH = """() => {
  window.sizes = [];
  const watcher = new MutationObserver(() => sizes.push(document.querySelectorAll(".answer .tokens .token").length));
  watcher.observe(document.querySelector(".turns"), { childList: true, subtree: true });
}"""


def teach(client: lorimer.TrainingClient) -> str:
    """A checkpoint that says one thing; its path."""
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.encode(f"{HOSTILE}<|im_end|>")
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), inputs)
    for _ in range(30):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(lorimer.AdamParams(learning_rate=1e-2))
    return client.save_weights_for_sampler("says-html", user_metadata={"note": HOSTILE}).result().path


@pytest.fixture(scope="module")
def hostile(keyed, trainer) -> str:
    return trainer.do(teach, trainer.run(keyed.url, key=keyed.key, rank=16))


def choose(page: Page, **settings: str) -> None:
    """Set sampling settings by their labels, with underscores for spaces."""
    for name, value in settings.items():
        page.locator(".settings").get_by_label(name.replace("_", " ")).fill(value)


def ask(page: Page, text: str) -> Locator:
    """Send a prompt and wait for the end of the first answer to it."""
    field = page.locator(".composer textarea")
    field.fill(text)
    field.press("Control+Enter" if page.get_by_role("button", name="Complete", exact=True).count() > 1 else "Enter")
    answer = page.locator(".answer").last
    expect(answer.locator(".figures")).to_contain_text(ENDED)
    return answer


def test_an_answer_streams_in_shaded_tokens_with_their_alternatives(keyed, open_page, hostile):
    page = open_page(keyed.url, f"/console/playground?mode=checkpoint&checkpoint={hostile}", key=keyed.key)
    expect(page.get_by_label("Model", exact=True)).to_have_attribute("title", hostile)
    # An answer of more than a hundred tokens: those that come together are shown together.
    choose(page, Temperature="2", Max_tokens="300", Seed="6")
    page.evaluate(GROWTH)
    answer = ask(page, "Write a long poem about the sea.")
    sizes = page.evaluate("sizes")
    assert sizes == sorted(sizes)
    assert any(0 < size < sizes[-1] for size in sizes), "tokens are shown while they come"
    tokens = answer.locator(".tokens .token")
    shades = {re.search(r"\bp(\d)\b", tokens.nth(i).get_attribute("class"))[1] for i in range(tokens.count())}
    assert len(shades) > 1, "likely and unlikely tokens look different"
    expect(answer.locator(".figures")).to_contain_text(re.compile(r"^prompt \d+.* · \d+ tokens · .* tokens/s · "))
    text = answer.locator(".tokens").text_content()
    page.get_by_label("Shade by probability").uncheck()
    expect(answer.locator(".tokens")).to_be_hidden()
    assert answer.locator(".prose").text_content() == text != ""


def test_alternatives_are_shown_under_the_pointer_and_the_focus(keyed, open_page):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}", key=keyed.key)
    choose(page, Temperature="0")
    answer = ask(page, "Who are you?")  # it answers in several tokens
    tip = page.get_by_role("tooltip")
    expect(tip).to_have_count(0)
    tokens = answer.locator(".token")
    tokens.first.hover()
    expect(tip).to_be_visible()
    rows = tip.get_by_role("row").all_inner_texts()
    chances = [float(re.search(r"([\d.]+) %", row)[1]) for row in rows]
    assert len(rows) >= 5 and chances == sorted(chances, reverse=True)
    expect(tip.locator(".chosen")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(tip).to_have_count(0)
    tokens.first.focus()
    expect(tip).to_be_visible()
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_attribute("aria-describedby", "token-tip")
    assert tip.inner_text() != first
    page.keyboard.press("Escape")
    expect(tip).to_have_count(0)
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    assert page.locator(".token[tabindex='0']").count() == 1, "tokens take one stop in the tab order"


def test_a_conversation_goes_on_and_outlives_a_visit_to_another_page(keyed, open_page):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}", key=keyed.key)
    choose(page, System_message="You add.", Temperature="0", Stop="never\n\\n\\n")
    said = ask(page, QUESTION).locator(".prose").text_content()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And 4 + 4?")
    body = json.loads(sent.value.post_data)
    assert body["messages"] == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And 4 + 4?"},
    ]
    assert (body["temperature"], body["stop"], body["stream"]) == (0, ["never", "\n\n"], True)
    assert "seed" not in body, "what is left empty is left out"
    page.get_by_role("link", name="Sessions").click()
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    page.get_by_role("link", name="Playground").click()
    expect(page.locator(".asked")).to_have_count(2)
    expect(page.locator(".answer .prose").first).to_have_text(said)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".asked")).to_have_count(0)
    page.reload()
    assert page.evaluate("Object.keys(localStorage)") == ["lorimer.key"]


def test_two_models_answer_one_prompt_side_by_side_and_hostile_text_stays_text(keyed, open_page, hostile):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}", key=keyed.key)
    page.get_by_role("button", name="Compare two").click()
    second = page.get_by_label("Second model", exact=True)
    second.fill("says-html")
    second.press("ArrowDown")
    second.press("Enter")
    expect(second).to_have_attribute("title", hostile)
    choose(page, Temperature="0")
    ask(page, QUESTION)
    panes = page.locator(".side")
    expect(page.locator(".asked .prose")).to_have_text(QUESTION)
    for pane in (panes.nth(0), panes.nth(1)):
        expect(pane.locator(".figures")).to_contain_text("ended")
    assert panes.nth(1).locator(".answer .prose").text_content() == HOSTILE
    assert panes.nth(1).locator(".tokens").text_content() == HOSTILE
    assert panes.nth(0).locator(".answer .prose").text_content() != HOSTILE
    left, right = panes.nth(0).bounding_box(), panes.nth(1).bounding_box()
    assert left["x"] + left["width"] <= right["x"] and abs(left["y"] - right["y"]) < 2
    panes.nth(1).locator(".token").first.focus()
    expect(page.get_by_role("tooltip")).to_contain_text("<")
    assert page.locator("img").count() == 0
    assert page.title() == "Playground · Lorimer"
    other = page.evaluate("new URLSearchParams(location.search).get('other')")
    assert other == hostile, "the address says what is compared"


def test_a_prompt_is_scored_and_hostile_prompts_are_text(keyed, open_page):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}&mode=complete", key=keyed.key)
    page.get_by_label("Score the prompt too").check()
    choose(page, Max_tokens="3", Temperature="0")
    prompt = f"{HOSTILE} 1 + 1 = \U0001f40e"
    answer = ask(page, prompt)
    expect(answer.locator(".token.unscored")).to_have_count(1)
    assert answer.locator(".tokens").text_content().startswith(prompt)
    horse = answer.locator(".token").filter(has_text="\U0001f40e")
    expect(horse).to_have_count(1)
    horse.hover()
    tables = page.get_by_role("tooltip").locator("table")
    assert tables.count() == 4, "a character of four tokens has the scores of all of them"
    expect(tables.first).to_contain_text("\\xf0")
    expect(page.locator(".asked .prose")).to_have_text(prompt)
    assert page.locator("img").count() == 0


def test_an_answer_can_be_stopped_and_asked_for_again(keyed, open_page):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}&mode=complete", key=keyed.key)
    choose(page, Max_tokens="900", Temperature="9", Seed="4")
    page.get_by_label("Prompt", exact=True).fill("Once")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    expect(page.locator(".answer .token").nth(3)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_contain_text("stopped by you")
    assert 3 < page.locator(".answer .token").count() < 900
    expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
    choose(page, Max_tokens="2")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".figures")).to_contain_text("2 tokens")
    expect(page.locator(".asked")).to_have_count(1)


def test_errors_are_shown_in_the_servers_words(keyed, open_page, watch):
    watch.expected |= {400, 404}
    page = open_page(keyed.url, f"/console/playground?model={MODEL}", key=keyed.key)
    cases = [
        ({"Top_p": "7"}, "top_p"),
        ({"Top_p": "1", "Max_tokens": "99999"}, "exceed the context length 1024"),
        ("tinker://none/sampler_weights/x", "there is no checkpoint"),
        ("not/served", "is not served here"),
        ("", "no model is chosen"),
    ]
    for number, (change, said) in enumerate(cases):
        if isinstance(change, str):
            page.get_by_label("Model", exact=True).fill(change)
        else:
            choose(page, **change)
        ask(page, f"{QUESTION} ({number})")
        expect(page.get_by_role("alert")).to_have_count(number + 1)
        expect(page.get_by_role("alert").last).to_contain_text(said)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


@pytest.mark.slow  # an engine of its own starts for it
def test_a_model_without_a_chat_template_completes_text_instead(keyed, open_page, watch):
    watch.expected.add(400)
    page = open_page(keyed.url, f"/console/playground?model={PLAIN}", key=keyed.key)
    answer = ask(page, QUESTION)
    expect(answer.get_by_role("alert")).to_contain_text("has no chat template")
    answer.get_by_role("button", name="Complete text instead").click()
    choose(page, Max_tokens="4")
    answer = ask(page, "1 + 1 =")
    expect(answer.locator(".figures")).to_contain_text(re.compile(r"\b[1-4] tokens?\b"))
    expect(page).to_have_url(re.compile(r"mode=complete"))


def test_a_phone_has_room_for_all_of_it(keyed, open_page):
    page = open_page(keyed.url, f"/console/playground?model={MODEL}&other={MODEL}", key=keyed.key, phone=True)
    expect(page.locator(".play-models .picker")).to_have_count(2)
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_role("button", name="Send").tap()
    expect(page.locator(".figures")).to_have_count(2)
    expect(page.locator(".figures").nth(1)).to_contain_text("ended")
    page.locator(".tokens .token").first.tap()
    tip = page.get_by_role("tooltip").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 360
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".settings summary").tap()
    expect(page.get_by_label("Temperature")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
