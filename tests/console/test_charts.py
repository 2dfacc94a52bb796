"""Charts of data that leave an axis without a span or a number without digits: the page stays responsive, and labels
can be told from each other."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Locator, Page, expect

import lorimer
from tests.console.conftest import SECONDS, OpenPage

MAX_BLOCKED_MS = 3000
"""The longest a page may hold up its browser; at rest it is 0.1 s, and machines that run tests are busy."""
MAX_HEAP_BYTES = 100_000_000
NUM_STEPS = 40
LARGEST = 1.7976931348623157e308
SMALLEST = 5e-324


def wave(middle: float, size: float) -> Callable[[int], float]:
    return lambda step: middle + size * math.sin(step)


SERIES: dict[str, Callable[[int], float | str]] = {
    "constant one": lambda step: 1.0,
    "constant zero": lambda step: 0.0,
    "constant negative": lambda step: -3.7,
    "constant huge": lambda step: 1e300,
    "constant tiny": lambda step: 1e-300,
    "constant largest": lambda step: LARGEST,
    "constant smallest": lambda step: SMALLEST,
    "ratio on policy": wave(1.0, 1e-7),
    "ratio below one": lambda step: 1.0 - 1e-7 * (step % 3),
    "one rounding": lambda step: 0.1 + 0.2 if step % 2 else 0.3,
    "one rounding of a large number": lambda step: 1e15 + 0.125 * (step % 2),
    "just not constant": wave(1.0, 1e-5),
    "narrow and large": wave(12_345.0, 0.5),
    "narrow and negative": wave(-1.0, 3e-8),
    "learning rate": lambda step: 1e-4,
    "huge": wave(0.0, 1e300),
    "both largest": lambda step: LARGEST if step % 2 else -LARGEST,
    "tiny": wave(2e-300, 1e-300),
    "smallest": lambda step: SMALLEST * (step % 2),
    "negative": wave(-50.0, 20.0),
    "mixed magnitudes": lambda step: 10.0 ** (15 * step - 300),
    "both signs of all magnitudes": lambda step: (-1) ** step * 10.0 ** (15 * step - 300),
    "single point": lambda step: 5.0,
    "nothing finite": lambda step: "NaN",
    "some finite": lambda step: 1.0 if step % 4 == 3 else ("NaN", "Infinity", "-Infinity")[step % 4],
    "ordinary": wave(2.0, 1.5),
}

OBSERVE = """() => {
    window.blocked = [];
    new PerformanceObserver((list) => blocked.push(...list.getEntries().map((one) => Math.round(one.duration))))
        .observe({ type: "longtask", buffered: true });
    window.labels = new Map();
    const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.clearRect = function (...values) {
        labels.set(this.canvas, []);
        return clearRect.apply(this, values);
    };
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (!labels.has(this.canvas)) labels.set(this.canvas, []);
        labels.get(this.canvas).push([text, this.textAlign]);
        return fillText.call(this, text, x, y);
    };
}"""
"""Note long tasks, and every text that is drawn: labels beside an axis are aligned right, those below are centred."""

LABELS = """([name, align]) => {
    const canvas = document.querySelector(`[data-metric='${name}'] canvas`);
    return (labels.get(canvas) ?? []).filter((one) => one[1] === align).map((one) => one[0]);
}"""

NUM_DRAWN = """(name) => {
    const canvas = document.querySelector(`[data-metric='${name}'] canvas`);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = "var(--c0)";
    const line = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    return Array.from({ length: data.length / 4 }, (_, n) => 4 * n)
        .filter((i) => line.every((part, channel) => data[i + channel] === part)).length;
}"""
"""Pixels in the colour of the first line."""


@dataclass(frozen=True)
class Watched:
    """A page whose long tasks and drawn texts are recorded from its beginning."""

    page: Page

    def chart(self, name: str) -> Locator:
        return self.page.locator(f".chart[data-metric='{name}']")

    def labels(self, name: str, align: str = "right") -> list[str]:
        found: list[str] = self.page.evaluate(LABELS, [name, align])
        return found

    def show_all(self) -> None:
        """Scroll every chart into view, one after the other, until it is drawn."""
        expect(self.page.locator(".chart")).to_have_count(len(SERIES))
        while self.page.evaluate(
            "() => { scrollBy(0, 300); return scrollY + innerHeight < document.body.scrollHeight; }"
        ):
            self.settle()
        expect(self.page.locator(".chart canvas")).to_have_count(len(SERIES))

    def settle(self) -> None:
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def check_responsive(self) -> None:
        self.settle()
        blocked = self.page.evaluate("() => window.blocked")
        assert max(blocked, default=0) < MAX_BLOCKED_MS, f"tasks held up the page for {blocked} ms"
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        assert found["JSHeapUsedSize"] < MAX_HEAP_BYTES, found

    def check_labels(self) -> None:
        for name in SERIES:
            labels = self.labels(name)
            assert len(labels) == len(set(labels)) <= 8, f"{name}: {labels}"
            assert max(map(len, labels), default=0) <= 12, f"{name}: {labels}"
            below = self.labels(name, "center")
            assert len(below) == len(set(below)) <= 16, f"{name}: {below}"


def values(step: int) -> dict[str, float | str]:
    return {name: value(step) for name, value in SERIES.items() if step == 1 or name != "single point"}


def report(url: str, run_id: str, points: list[dict]) -> None:
    answer = httpx2.post(f"{url}/api/v1/training_runs/{run_id}/metrics", json={"points": points}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def run(server, trainer) -> lorimer.TrainingClient:
    client = trainer.run(server.url)
    points = [{"step": step, "time": 1.7e9 + 13 * step, "values": values(step)} for step in range(NUM_STEPS)]
    report(server.url, client.model_id, points)
    return client


@pytest.fixture
def watched(server, open_page: OpenPage) -> Callable[[str], Watched]:
    def begin(path: str) -> Watched:
        page = open_page(server.url, "/console/runs")
        page.add_init_script(f"({OBSERVE})()")
        page.goto(path)
        return Watched(page)

    return begin


@pytest.mark.parametrize("query", ["", "log=1", "smooth=0.9", "x=elapsed", "x=clock&log=1&smooth=0.5"])
def test_no_series_holds_up_the_page_and_labels_differ(watched, run, query):
    looked = watched(f"/console/runs/{run.model_id}?constants=1&{query}")
    looked.show_all()
    looked.check_responsive()
    looked.check_labels()
    empty = {"nothing finite"}
    if "log" in query:
        empty |= {"constant zero", "constant negative", "narrow and negative", "negative"}
    for name in SERIES:
        assert bool(looked.labels(name)) is (name not in empty), name


def test_a_nearly_constant_series_is_a_line_in_the_middle_of_a_readable_axis(watched, run):
    looked = watched(f"/console/runs/{run.model_id}?constants=1")
    looked.show_all()
    assert {"0.95", "1.00", "1.05"} < set(looked.labels("ratio on policy"))
    assert {"9.5e299", "1.00e300", "1.05e300"} < set(looked.labels("constant huge"))
    assert looked.labels("narrow and large")[0].startswith("12.344")
    assert looked.labels("just not constant")[0].startswith("0.9999")
    assert looked.labels("constant zero") == ["-1.0", "-0.5", "0", "0.5", "1.0"]
    assert looked.labels("mixed magnitudes")[0] == "0"
    assert looked.page.evaluate(NUM_DRAWN, "some finite") >= 10, "points between gaps are drawn"


def test_zooming_hovering_and_comparing_hold_up_nothing(server, trainer, watched, run):
    other = trainer.run(server.url)
    shifted = [{"step": 3 * step, "values": {"constant one": 1.0 + 2e-7, "huge": 1e-300}} for step in range(NUM_STEPS)]
    report(server.url, other.model_id, shifted)
    looked = watched(f"/console/runs/{run.model_id}?compare={other.model_id}&constants=1&smooth=0.6")
    looked.show_all()
    for name in ("constant one", "huge", "single point"):
        place = looked.chart(name).locator(".u-over")
        place.scroll_into_view_if_needed()
        for _ in range(3):  # to less than a step
            zoom(looked.page, place)
            looked.settle()
        labels = looked.labels(name, "center")
        assert labels and len(labels) == len(set(labels)), f"{name}: {labels}"
        place.dblclick()
    expect(looked.chart("constant one")).to_have_attribute("data-points", f"{NUM_STEPS} {NUM_STEPS}")
    looked.check_responsive()
    looked.check_labels()


def zoom(page: Page, place: Locator) -> None:
    """Drag over a tenth of a chart in which the pointer has been before."""
    box = place.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.45 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.55 * box["width"], middle, steps=3)
    page.mouse.up()


def test_the_value_under_the_pointer_is_exact_where_the_range_is_narrow(watched, run):
    looked = watched(f"/console/runs/{run.model_id}?metric=narrow and large")
    chart = looked.chart("narrow and large")
    chart.locator(".u-over").hover()
    shown, step = chart.locator(".chart-values").inner_text().split("step ")
    assert float(shown.strip().removesuffix("k")) * 1000 == pytest.approx(
        values(int(step))["narrow and large"], abs=0.01
    )


# ── the arithmetic ──────────────────────────────────────────────────────────────────────────────────────

AXIS = """async ([kind, low, high]) => {
    const scales = await import("/console/static/scales.js");
    const [range, ticks, labels] = {
        linear: () => [scales.linearRange(low, high), scales.linearTicks, scales.linearLabels],
        log: () => [scales.logRange(low, high), scales.logTicks, scales.logLabels],
        duration: () => [scales.widened(low, high, 1e-3), scales.durationTicks, scales.durationLabels],
    }[kind]();
    const found = ticks(...range, 4);
    return { range, ticks: found, labels: found.length ? labels(found) : [] };
}"""
MAX_DRAWN = 0.4 * LARGEST


def ends(low: float, high: float) -> st.SearchStrategy[list[float]]:
    """Two numbers, equal or apart by little or by much."""
    one = st.floats(low, high)
    near = st.builds(
        lambda number, part: [number, min(max(number * (1 + part), low), high)],
        one,
        st.sampled_from([0.0, 1e-16, 1e-9, 1e-7, 1e-5, 1e-3]),
    )
    return st.one_of(st.lists(one, min_size=2, max_size=2), near).map(sorted)


def test_every_axis_shows_its_values_and_has_few_ticks_that_differ(server, open_page):
    page = open_page(server.url)
    kinds = {"linear": ends(-MAX_DRAWN, MAX_DRAWN), "log": ends(1e-300, MAX_DRAWN), "duration": ends(0.0, 1e11)}

    @settings(max_examples=300, deadline=None)
    @given(st.one_of(*(st.tuples(st.just(kind), found) for kind, found in kinds.items())))
    def check(case: tuple[str, list[float]]) -> None:
        kind, (least, most) = case
        axis = page.evaluate(AXIS, [kind, least, most])
        (low, high), ticks, labels = axis["range"], axis["ticks"], axis["labels"]
        assert low < high and math.isfinite(high - low), axis
        assert low <= least and most <= high, axis
        assert 1 <= len(ticks) <= 7 and ticks == sorted(set(ticks)), axis
        edge = 1e-9 * (high - low)
        assert low - edge <= ticks[0] and ticks[-1] <= high + edge, axis
        assert len(set(labels)) == len(ticks), axis

    check()
