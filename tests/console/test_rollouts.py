"""The rollouts of a run in the console: by step and reward, one, a group, two steps; linked, exported and quick."""

import json
import random
import re
import time

import pytest
from playwright.sync_api import Page, expect

import lorimer
from tests.console.conftest import Trainer
from tests.console.test_charts import MAX_BLOCKED_MS
from tests.console.test_hostile_text import CLEAN, INJECTED, hostile
from tests.console.test_long_run import drag

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 4, 3, 4


def rollout(step: int, group: int, number: int) -> dict:
    """A rollout of two sampled turns; the answer of its last one names it."""
    reward = (number + step) % 4 / 4
    words = ["so", " it", " is", f" {step}-{group}-{number}"]
    offsets = [sum(map(len, words[:n])) for n in range(4)]
    call = {"name": "add", "arguments": '{"a": 1}', "result": "two", "seconds": 0.1}
    failed = {"name": "divide", "arguments": "{}", "error": "Error: by zero"}
    logprobs = [-0.01, -0.5, -1.5, -6.0]
    tokens = {"tokens": [4, 5, 6, 7], "logprobs": logprobs, "offsets": offsets}
    return {
        "turns": [
            {"role": "user", "content": f"Question {group}?"},
            {"role": "assistant", "content": "let me see", "tool_calls": [call, failed][: 1 + (number == 3)]},
            {"role": "tool", "content": "two"},
            {"role": "assistant", "content": "".join(words), **tokens, "reward": reward, "logs": {"note": "graded"}},
        ],
        "reward": reward,
        "reward_parts": {"correct": reward},
        "advantage": reward - 0.375,
        "group": str(group),
        "stop_reason": "length" if number == 2 else "stop",
        "errors": ["the grader was late"] if number == 1 else [],
        "seconds": {"sampling": 1.5},
    }


def log(client: lorimer.TrainingClient) -> None:
    for step in range(NUM_STEPS):
        batch = [rollout(step, group, number) for group in range(NUM_GROUPS) for number in range(GROUP_SIZE)]
        client.log_rollouts(batch, step).result()
        client.log_metrics({"reward": step / 4}, step).result()


@pytest.fixture(scope="module")
def run(server, trainer: Trainer) -> lorimer.TrainingClient:
    client = trainer.run(server.url, run={"name": "told"})
    trainer.do(log, client)
    return client


@pytest.fixture
def viewer(server, open_page, run):
    def viewer(query: str = "", **options) -> Page:
        page = open_page(server.url, f"/console/runs/{run.model_id}/rollouts{query}", **options)
        expect(page.locator(".rollout-list:not([data-loading])")).to_be_attached()
        return page

    return viewer


def answers(page: Page) -> list[str]:
    return page.locator(".rollout-answer").all_text_contents()


def expect_answers(page: Page, *expected: str) -> None:
    expect(page.locator(".rollout-answer")).to_have_text(list(expected))


def test_steps_bins_filters_and_sorting(viewer):
    page = viewer()
    step = NUM_STEPS - 1
    expect_answers(page, *(f"so it is {step}-{group}-{number}" for group in range(3) for number in range(4)))
    expect(page.locator(".rollout-group")).to_have_count(NUM_GROUPS)
    page.get_by_role("button", name="Previous step").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("2")
    page.locator(".strip-step[data-step='1']").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("1")
    expect(page.locator(".rollout-answer").first).to_have_text("so it is 1-0-0")
    counts = [int(one.get_attribute("data-count")) for one in page.locator(".bin").all()]
    assert sum(counts) == 12 and sorted(counts)[-4:] == [3, 3, 3, 3]
    page.locator(".bin").last.click()
    expect_answers(page, *(f"so it is 1-{group}-2" for group in range(3)))
    expect(page.locator(".bin").last).to_have_attribute("aria-pressed", "true")
    page.locator(".bin").last.click()
    expect(page.locator(".rollout-answer")).to_have_count(12)
    page.get_by_label("Search rollouts").fill("1-2- reward>0.3")
    expect_answers(page, "so it is 1-2-1", "so it is 1-2-2")
    page.get_by_label("Sort").select_option("-reward")
    expect_answers(page, "so it is 1-2-2", "so it is 1-2-1")
    page.get_by_label("Stop reason").select_option("length")
    expect_answers(page, "so it is 1-2-2")
    page.reload()
    expect_answers(page, "so it is 1-2-2")
    page.get_by_label("Search rollouts").fill("")
    page.get_by_role("button", name="All steps").click()
    expect(page.locator(".rollout")).to_have_count(NUM_STEPS * NUM_GROUPS)
    page.get_by_label("Search rollouts").fill("loss<3")
    expect(page.locator(".toast")).to_contain_text("there is no field 'loss'")


@pytest.fixture(autouse=True)
def expected_refusal(watch, request):
    if "filters" in request.node.name:
        watch.expected |= {400}


IS_SHOWN = """() => {
    const list = document.querySelector(".rollout-list"), opened = list.querySelector("a[aria-current]");
    const [there, frame] = [opened, list].map((one) => one.getBoundingClientRect());
    return there.top > frame.top - 1 && there.bottom < frame.bottom + 1;
}"""


def test_the_list_shows_the_opened_rollout(viewer):
    page = viewer("?step=2")
    page.set_viewport_size({"width": 1280, "height": 500})
    page.locator(".rollout a").last.click()
    expect(page.locator(".rollout a[aria-current]")).to_contain_text("so it is 2-2-3")
    page.wait_for_function(IS_SHOWN)
    late = re.compile("/rollouts[?].*limit=50")  # the list, after the rollout that is open
    page.route(late, lambda route: (time.sleep(1), route.continue_()))
    page.reload()
    expect(page.locator(".rollout a[aria-current]")).to_contain_text("so it is 2-2-3")
    page.wait_for_function(IS_SHOWN)
    page.locator(".rollout-list").evaluate("list => list.scrollTo(0, 0)")
    assert not page.evaluate(IS_SHOWN)
    expect(page.get_by_role("button", name="Previous rollout")).to_be_enabled()
    page.get_by_role("button", name="Previous rollout").press("Enter")
    expect(page.locator(".rollout a[aria-current]")).to_contain_text("so it is 2-2-2")
    page.wait_for_function(IS_SHOWN)


def test_one_rollout_its_group_and_another_step(viewer):
    page = viewer("?step=2")
    page.locator(".rollout a").nth(7).click()
    detail = page.locator(".rollout-detail")
    expect(detail.get_by_role("heading")).to_have_text("Step 2, group 1, #3")
    assert [turn.text_content() for turn in detail.locator(".turn-head b").all()] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    expect(detail.locator(".tool-call")).to_have_count(2)
    expect(detail.locator(".tool-call.failed")).to_contain_text("Error: by zero")
    for text in ("Question 1?", "let me see", "two", "so it is 2-1-3", "correct 0.25", "graded", "sampling 1.5 s"):
        expect(detail).to_contain_text(text)
    page.get_by_label("Shading").select_option("logprob")
    expect(detail.locator(".tokens .token")).to_have_count(4)
    shades = [one.get_attribute("class") for one in detail.locator(".tokens .token").all()]
    assert shades == ["token p0", "token p2", "token p3", "token p5"]
    page.get_by_label("Shading").select_option("advantage")
    expect(detail.locator(".tokens .loss4")).to_have_count(4)
    page.get_by_role("button", name="Group", exact=True).click()
    columns = page.locator(".group-column")
    expect(columns).to_have_count(GROUP_SIZE)
    expect(columns.nth(1).locator(".rollout-errors")).to_have_text("the grader was late")
    expect(columns.nth(3)).to_contain_text("so it is 2-1-3")
    expect(page.locator(".group-view summary + .turns")).to_contain_text("Question 1?")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.locator(".group-column")).to_have_count(GROUP_SIZE)
    page.get_by_role("button", name="Other steps").click()
    expect(page.locator(".group-column header b")).to_have_text(["step 1", "step 2"])
    expect(page.locator(".group-column del")).to_have_text("1")
    expect(page.locator(".group-column ins")).to_have_text("2")
    page.get_by_label("Compare with").select_option(label="step 3, #0, reward 0.75")
    expect(page.locator(".group-column header b")).to_have_text(["step 2", "step 3"])
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".rollout-detail")).to_be_empty()
    expect(page).not_to_have_url(re.compile(r"rollout="))


def test_a_click_on_a_chart_shows_the_rollouts_of_its_step(server, open_page, run):
    page = open_page(server.url, f"/console/runs/{run.model_id}?metric=reward")
    over = page.locator(".chart[data-metric='reward'] .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.66, box["y"] + 60)
    expect(page).to_have_url(re.compile(r"/rollouts\?step=2$"))
    expect(page.locator(".rollout-answer").first).to_have_text("so it is 2-0-0")
    page.get_by_role("link", name="Overview", exact=True).last.click()
    expect(over).to_be_visible()
    drag(page, over, 0.2, 0.8)
    page.wait_for_timeout(500)
    expect(page).not_to_have_url(re.compile("rollouts"))


def test_training_and_evaluation_are_apart_until_all_splits_are_chosen(server, open_page, trainer):
    client = trainer.run(server.url)

    def log_both() -> None:
        for step in range(3):
            batch = [rollout(step, 0, number) for number in range(GROUP_SIZE)]
            told = [rollout(step, group, 2) | {"kind": "sample", "split": "test"} for group in range(2)]
            client.log_rollouts([*told, *(batch if step < 2 else [])], step).result()
            client.log_metrics({"test/reward": step / 2, "time/total": 2.5, "time/step_seconds": 0.25}, step).result()

    trainer.do(log_both)
    page = open_page(server.url, f"/console/runs/{client.model_id}/rollouts")
    split = page.get_by_label("Split")
    expect_answers(page, *(f"so it is 1-0-{number}" for number in range(GROUP_SIZE)))
    expect(split).to_have_value("train")
    expect(page.locator(".rollout-times")).to_have_text("step 250 ms, total 2.5 s")
    assert split.locator("option").all_text_contents() == ["all splits", "train", "test"]
    split.select_option("test")
    expect_answers(page, "so it is 2-0-2", "so it is 2-1-2")
    assert split.locator("option").all_text_contents() == ["all splits", "train", "test"]
    split.select_option("all splits")
    page.locator(".strip-step[data-step='1']").click()
    expect(page.locator(".rollout")).to_have_count(2 + GROUP_SIZE)
    page.reload()
    expect(page.locator(".rollout")).to_have_count(2 + GROUP_SIZE)
    page.goto(f"/console/runs/{client.model_id}?metric=test")
    over = page.locator(".chart[data-metric='test/reward'] .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + 60)
    expect(page).to_have_url(re.compile(r"/rollouts\?step=2&split=test$"))
    expect_answers(page, "so it is 2-0-2", "so it is 2-1-2")


def test_export_has_every_rollout_of_the_list(viewer):
    page = viewer("?step=all&q=group%3D1")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export JSONL").click()
    lines = [json.loads(line) for line in saved.value.path().read_text("utf-8").splitlines()]
    assert len(lines) == NUM_STEPS * GROUP_SIZE
    assert [turn["role"] for turn in lines[0]["content"]["turns"]] == ["user", "assistant", "tool", "assistant"]


def test_new_steps_appear_and_a_phone_shows_one_at_a_time(server, open_page, trainer):
    client = trainer.run(server.url)
    page = open_page(server.url, f"/console/runs/{client.model_id}/rollouts", phone=True)
    expect(page.get_by_text("No rollouts yet.")).to_be_visible()
    trainer.do(lambda: client.log_rollouts([rollout(0, 0, n) for n in range(3)], 0).result())
    expect(page.locator(".rollout-answer").first).to_have_text("so it is 0-0-0")
    trainer.do(lambda: client.log_rollouts([rollout(1, 0, n) for n in range(3)], 1).result())
    expect(page.locator(".rollout-answer").first).to_have_text("so it is 1-0-0")
    page.locator(".rollout a").first.tap()
    expect(page.locator(".rollout-detail .turns")).to_be_visible()
    expect(page.locator(".rollout-list")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.get_by_role("button", name="Group", exact=True).tap()
    expect(page.locator(".group-column")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_hostile_text_is_text(server, open_page, trainer):
    client = trainer.run(server.url)
    nasty = {name: hostile(name) for name in ("content", "result", "arguments", "log", "error", "group", "stop", "tag")}

    def send() -> None:
        call = {"name": hostile("tool"), "arguments": nasty["arguments"], "result": nasty["result"]}
        turn = {
            "role": hostile("r")[:100],
            "content": nasty["content"],
            "tool_calls": [call],
            "logs": {nasty["log"]: nasty["log"]},
        }
        sampled = {
            "role": "assistant",
            "content": nasty["content"],
            "tokens": [1, 2],
            "logprobs": [-1, -2],
            "offsets": [0, 5],
        }
        fields = {"group": nasty["group"], "stop_reason": nasty["stop"][:100], "errors": [nasty["error"]]}
        batch = [
            {"turns": [turn, sampled], "reward": 1, "tags": [nasty["tag"][:100]], "split": "<b id=x>", **fields}
        ] * 2
        for step in range(2):
            client.log_rollouts(batch, step).result()

    trainer.do(send)
    page = open_page(server.url, f"/console/runs/{client.model_id}/rollouts?shade=logprob")
    for view in ("Rollout", "Group", "Other steps"):
        if view == "Rollout":
            page.locator(".rollout a").first.click()
        page.get_by_role("button", name=view, exact=True).click()
        expect(page.locator(".rollout-detail")).to_contain_text("<img src=x onerror=")
        assert page.evaluate(INJECTED) == CLEAN


DIFF = """async (pairs) => {
    const { diffTexts } = await import("/console/static/text_diff.js");
    return pairs.map(([before, after]) => diffTexts(before, after));
}"""


def test_differences_are_the_least_and_lose_nothing(viewer):
    page, draw = viewer(), random.Random(5)
    pairs = [[" ".join(draw.choices("abc", k=draw.randrange(12))) for _ in range(2)] for _ in range(200)]
    pairs += [["", ""], ["x " * 3000, "y " * 3000], ["naïve 👍 ok", "naïve 👎 ok"]]
    for (before, after), pieces in zip(pairs, page.evaluate(DIFF, pairs), strict=True):
        assert "".join(one["text"] for one in pieces if one["kind"] != "added") == before
        assert "".join(one["text"] for one in pieces if one["kind"] != "removed") == after
        if len(before) < 100:
            same = sum(len(re.findall(r"\s+|\w+|[^\s\w]", one["text"])) for one in pieces if one["kind"] == "same")
            words = [re.findall(r"\s+|\w+|[^\s\w]", text) for text in (before, after)]
            assert same == longest_common(*words)


def longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


OBSERVE = """() => {
    window.blocked = [];
    new PerformanceObserver((list) => blocked.push(...list.getEntries().map((one) => Math.round(one.duration))))
        .observe({ type: "longtask", buffered: true });
}"""
NUM_MANY = 10_000


def test_ten_thousand_rollouts_never_hold_up_the_page(server, open_page, trainer):
    client = trainer.run(server.url)

    def send() -> None:
        futures = []
        for step in range(100):
            batch = [
                {
                    "turns": [
                        {"role": "user", "content": f"Question {number % 9}"},
                        {"role": "assistant", "content": f"answer {number} " * 60, "tokens": [1] * (number % 50)},
                    ],
                    "reward": number * 37 % 101 / 100,
                    "group": str(number // 10),
                }
                for number in range(NUM_MANY // 100)
            ]
            futures.append(client.log_rollouts(batch, step))
        for future in futures:
            future.result()

    trainer.do(send)
    page = open_page(server.url, "/console/runs")
    page.add_init_script(f"({OBSERVE})()")
    page.goto(f"/console/runs/{client.model_id}/rollouts?step=all&sort=-reward")
    expect(page.locator(".rollout-list[data-total='10000']")).to_be_visible()
    expect(page.locator(".rollout")).to_have_count(50)
    page.get_by_role("button", name=re.compile("Show more")).click()
    expect(page.locator(".rollout")).to_have_count(100)
    page.get_by_label("Search rollouts").fill("answer 77")
    expect(page.locator(".rollout-list[data-total='100']")).to_be_visible()
    page.locator(".strip-step").nth(50).click()
    page.locator(".rollout a").first.click()
    expect(page.locator(".rollout-detail .turns")).to_be_visible()
    page.get_by_role("button", name="Other steps").click()
    expect(page.locator(".group-columns.two")).to_be_visible()
    blocked = page.evaluate("() => window.blocked")
    assert max(blocked, default=0) < MAX_BLOCKED_MS, f"tasks held up the page for {blocked} ms"
