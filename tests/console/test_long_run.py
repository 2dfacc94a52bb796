"""A run that is longer than a chart is wide: thinned at first, whole where somebody looks closely, and in CSV."""

import re
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from playwright.sync_api import Page, expect

import lorimer
from tests.console.conftest import SECONDS

NUM_STEPS = 20_000
SPIKE, GAP = 12_345, 7_000


def report(url: str, run_id: str, points: list[dict]) -> None:
    answer = httpx2.post(f"{url}/api/v1/training_runs/{run_id}/metrics", json={"points": points}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text


def values(step: int) -> dict[str, float | str]:
    """Two metrics that are mostly small; one has a spike and one a gap."""
    return {
        "reward": 9.0 if step == SPIKE else (step * 7919 % 100 == 0) * 1.0,
        "length": "NaN" if step == GAP else step % 100 / 100,
    }


@pytest.fixture(scope="module")
def long_run(server, trainer) -> lorimer.TrainingClient:
    client = trainer.run(server.url)
    for first in range(0, NUM_STEPS, 5000):
        points = [{"step": step, "values": values(step)} for step in range(first, first + 5000)]
        report(server.url, client.model_id, points)
    return client


def points_of(page: Page, name: str) -> int:
    return int(page.locator(f".chart[data-metric='{name}']").get_attribute("data-points") or 0)


def test_a_long_run_is_thinned_and_whole_where_one_looks_and_grows(server, open_page, long_run):
    asked: list[str] = []
    page = open_page(server.url, "/console/runs")
    page.on("request", lambda request: asked.append(request.url) if "/metrics?" in request.url else None)
    page.goto(f"/console/runs/{long_run.model_id}")
    chart = page.locator(".chart[data-metric='reward']")
    expect(chart.locator("canvas")).to_be_visible()
    before = points_of(page, "reward")
    assert 500 < before <= 2000 and all("max_points=2000" in url for url in asked)
    expect(
        page.get_by_text(re.compile(r"Of every \d\d steps the first, last, least and greatest value"))
    ).to_be_visible()
    length = page.locator(".chart[data-metric='length']")
    expect(length).to_contain_text("first not finite at step 7,000")
    assert page.evaluate(COUNT_RED) > 5
    assert chart.get_attribute("data-last") == str(int(values(NUM_STEPS - 1)["reward"]))

    with page.expect_request(lambda request: "first_step=" in request.url) as looked:
        drag(page, chart.locator(".u-over"), 0.60, 0.64)
    query = parse_qs(urlsplit(looked.value.url).query)
    first, last = int(query["first_step"][0]), int(query["last_step"][0])
    assert first <= SPIKE <= last and last - first < 1500
    outside = page.evaluate(COUNT_OUTSIDE, [long_run.model_id, first, last])
    whole = outside + last - first + 1
    expect(chart).to_have_attribute("data-points", str(whole))

    report(server.url, long_run.model_id, [{"step": NUM_STEPS + n, "values": {"reward": n / 8}} for n in range(5)])
    expect(chart).to_have_attribute("data-points", str(whole + 5))
    assert chart.get_attribute("data-last") == "0.5"


def drag(page: Page, place, begin: float, end: float) -> None:
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 55, steps=4)
    page.mouse.up()


COUNT_RED = """() => {
    const canvas = document.querySelector("[data-metric=length] canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const isRed = (i) => data[i] === 178 && data[i + 1] === 53 && data[i + 2] === 44;
    return Array.from({ length: data.length / 4 }, (_, n) => 4 * n).filter(isRed).length;
}"""
"""Pixels of the mark below a value that is not finite."""

COUNT_OUTSIDE = """async ([runId, first, last]) => {
    const { RunMetrics } = await import("/console/static/run_metrics.js");
    const metrics = new RunMetrics(runId);
    await metrics.poll();
    const [steps, values] = metrics.columns("client reward", "step");
    if (!values.includes(9)) throw new Error("the spike is lost");
    return steps.filter((step) => step < first || step > last).length;
}"""
"""Of the points of a fresh look at the run, those that are not of these steps; the spike must be among all."""


def test_csv_has_every_point(server, open_page, long_run):
    page = open_page(server.url, f"/console/runs/{long_run.model_id}?metric=reward")
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    lines = saved.value.path().read_text("utf-8").splitlines()
    assert lines[0] == "run,source,metric,step,time,value"
    cells = [line.split(",") for line in lines[1:]]
    rewards = {int(step): float(value) for _, _, name, step, _, value in cells if name == "reward"}
    assert {step: rewards[step] for step in range(NUM_STEPS)} == {
        step: values(step)["reward"] for step in range(NUM_STEPS)
    }
    lengths = {int(step): value for _, _, name, step, _, value in cells if name == "length"}
    assert len(lengths) == NUM_STEPS and lengths[GAP] == "" and float(lengths[99]) == 0.99
    assert len(cells) == len(rewards) + len(lengths)


KEEP = """async ([given, most]) => {
    const { Points } = await import("/console/static/thinning.js");
    const points = new Points();
    for (const [series, stepsPerBucket] of given) points.add(series, stepsPerBucket, most);
    const plain = (found) => found.map(([step, [, value]]) => [step, value]);
    return { at: plain([...points.at]), sample: plain(points.sample()), stepsPerBucket: points.stepsPerBucket };
}"""


def test_what_the_page_has_grown_to_is_thinned_like_on_the_server(server, open_page):
    page = open_page(server.url)
    rare: list[list[float | None]] = [[step, 0.0, 1.0 if step % 50 == 3 else 0.0] for step in range(5000)]
    rare[2600][2], rare[2700][2] = None, 40.0
    grown = page.evaluate(KEEP, [[[rare, 1]], 500])
    kept = dict(map(tuple, grown["at"]))
    assert len(kept) <= 500 and grown["stepsPerBucket"] == 64
    assert (kept[2700], kept[2600], kept[0], kept[4999]) == (40.0, None, 0.0, 0.0)
    assert all(rare[step][2] == value for step, value in kept.items())
    sample = [value for _, value in grown["sample"] if value is not None]
    assert len(sample) > 100 and sum(sample) / len(sample) < 0.1, "what is averaged is not chosen for being extreme"
    few = page.evaluate(KEEP, [[[rare[:1000], 1]], 500])
    assert len(few["at"]) == len(few["sample"]) == 1000 and few["stepsPerBucket"] == 1


def test_points_that_are_written_again_leave_no_old_ones_behind(server, open_page):
    page = open_page(server.url)
    old = [[step, 0.0, 5.0] for step in range(256)]
    new = [[step, 0.0, 1.0] for step in (0, 63, 64, 127)]
    found = dict(map(tuple, page.evaluate(KEEP, [[[old, 1], [new, 64]], 500])["at"]))
    assert found == dict.fromkeys((0, 63, 64, 127), 1.0) | dict.fromkeys(range(128, 256), 5.0)


def test_steps_between_two_moments_reach_to_the_points_around_them(server, open_page):
    page = open_page(server.url)
    script = """async ([points, low, high]) => {
        const { RunMetrics } = await import("/console/static/run_metrics.js");
        const { Points } = await import("/console/static/thinning.js");
        const metrics = new RunMetrics("x");
        metrics.firstTime = points[0][1];
        metrics.series.set("one", { points: new Points() });
        metrics.series.get("one").points.add(points, 1, 500);
        return [metrics.stepsBetween("elapsed", low, high), metrics.stepsBetween("step", low, high)];
    }"""
    points = [[step, 1000.0 + 2 * step, 1.0] for step in range(0, 100, 5)]
    assert page.evaluate(script, [points, 25.5, 38.5]) == [[10, 20], [25, 39]]
    assert page.evaluate(script, [points, 180.5, 999]) == [[90, 95], [180, 999]]
