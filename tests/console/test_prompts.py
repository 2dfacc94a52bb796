"""Prompt sets: saved in the browser, uploaded, run against two models a few requests at a time, exported."""

import json
from pathlib import Path

from playwright.sync_api import Page, Route, expect

from .conftest import MODEL

QUESTIONS = [f"What is {i} + {i}?" for i in range(1, 10)]
TALK = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye")]
HOSTILE = '<img src=x onerror="document.title=1">'


def opened(open_page, keyed) -> Page:
    page: Page = open_page(keyed.url, f"/console/playground/prompts?model={MODEL}", key=keyed.key)
    expect(page.get_by_role("heading", name="Prompt sets")).to_be_visible()
    return page


def upload(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload").click()
    chooser.value.set_files(file)


def test_a_set_is_saved_run_against_two_models_and_exported(keyed, open_page):
    page = opened(open_page, keyed)
    page.get_by_label("Name").fill("sums")
    page.get_by_label("Prompts").fill("\n\n".join(QUESTIONS))
    page.get_by_role("button", name="Save set").click()
    page.reload()
    page.get_by_label("Saved sets").select_option("sums")
    expect(page.get_by_label("Prompts")).to_have_value("\n\n".join(QUESTIONS))
    page.get_by_label("Compare two").check()
    page.get_by_label("Second model", exact=True).fill(MODEL)
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("System message").fill("You add.")
    page.get_by_role("button", name="Run set").click()
    expect(page.get_by_role("status").filter(has_text="18 of 18 answers")).to_be_visible()
    expect(page.locator("main tbody tr")).to_have_count(len(QUESTIONS))
    expect(page.locator("main tbody .figures")).to_have_count(2 * len(QUESTIONS))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSONL").click()
    lines = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert [line["messages"] for line in lines] == [[{"role": "user", "content": text}] for text in QUESTIONS]
    for line in lines:
        first, second = line["answers"]
        assert first == second, "at temperature 0 both answer the same"
        assert first["model"] == MODEL and first["error"] is None and 0 < first["num_tokens"] <= 8
        assert first["mean_logprob"] <= 0 and first["finish_reason"] in ("stop", "length")
    shown = page.locator("main tbody tr").first.locator("td").nth(1).locator(".prose")
    assert shown.text_content() == lines[0]["answers"][0]["text"]


def test_few_requests_are_open_and_the_rest_wait(keyed, open_page):
    page = opened(open_page, keyed)
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_label("Prompts").fill("\n".join(QUESTIONS))
    with page.expect_request(lambda request: QUESTIONS[3] in (request.post_data or "")):
        page.get_by_role("button", name="Run set").click()
    held[0].continue_()
    expect(page.get_by_role("status").filter(has_text="1 of 9 answers")).to_be_visible()
    assert len(held) == 5, "four are open, and an answer makes room for one request"
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status").filter(has_text="1 of 9 answers, stopped")).to_be_visible()
    expect(page.get_by_role("button", name="Run set")).to_be_enabled()


def test_files_of_messages_are_accepted_and_others_refused_by_line(keyed, open_page, tmp_path: Path, watch):
    page = opened(open_page, keyed)
    file = tmp_path / "mixed.jsonl"
    rows = [
        {"prompt": f"{HOSTILE}\nsecond line"},
        {"messages": [{"role": role, "content": text} for role, text in TALK]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    upload(page, file)
    expect(page.get_by_label("Name")).to_have_value("mixed")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Run set").click()
    expect(page.get_by_role("status").filter(has_text="2 of 2 answers")).to_be_visible()
    expect(page.locator("main tbody tr").nth(0)).to_contain_text(HOSTILE)
    expect(page.locator("main tbody tr").nth(1)).to_contain_text("Bye (after 2 messages)")
    assert page.locator("main img").count() == 0
    file.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    upload(page, file)
    expect(page.get_by_role("alert").last).to_contain_text("Line 2 has neither")
    watch.expected.add(404)
    page.get_by_label("Model", exact=True).fill("not/served")
    page.get_by_role("button", name="Run set").click()
    expect(page.locator("main .error-text")).to_have_count(2)
    expect(page.locator("main .error-text").first).to_contain_text("is not served here")
