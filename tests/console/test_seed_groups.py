"""Runs that differ only in their seed: grouped by configuration, and drawn as mean and deviation."""

import re

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect

from tests.console.conftest import SECONDS
from tests.console.test_run import chart

MEAN = """async ([curves]) => {
    const { meanOf } = await import("/console/static/seed_groups.js");
    return meanOf(curves);
}"""

Curve = st.dictionaries(st.integers(0, 12), st.one_of(st.none(), st.floats(-100, 100)), max_size=8)


def test_mean_and_deviation_are_those_of_numpy(server, open_page):
    page = open_page(server.url)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(Curve, min_size=1, max_size=4))
    def check(curves: list[dict[int, float | None]]) -> None:
        columns = [[sorted(one), [one[step] for step in sorted(one)]] for one in curves]
        found = page.evaluate(MEAN, [columns])
        expected = {}
        known = [one for one in curves if one]
        for step in sorted({step for one in known for step in one}):
            there = [one.get(step) for one in known if min(one) <= step <= max(one)]
            if None not in there:
                expected[step] = np.mean(there), np.std(there, ddof=1) if len(there) > 1 else 0.0
        assert found["columns"][0] == list(expected)
        assert found["columns"][1] == pytest.approx([mean for mean, _ in expected.values()], abs=1e-9)
        for edge, sign in zip(found["band"], (-1, 1), strict=True):
            assert edge == pytest.approx([mean + sign * dev for mean, dev in expected.values()], abs=1e-9)

    check()


def test_runs_with_other_seeds_are_one_line_with_their_number(server, open_page, trainer):
    runs = []
    for rate in (0.1, 0.2):
        for seed in (0, 1, 2):
            config = {"rate": rate, "data": {"seed": seed}, "seed": seed}
            client = trainer.run(server.url, run={"name": f"rate {rate} seed {seed}", "config": config})
            points = [{"step": step, "values": {"score": rate * step + seed}} for step in range(10)]
            path = f"{server.url}/api/v1/training_runs/{client.model_id}/metrics"
            assert httpx2.post(path, json={"points": points}, timeout=SECONDS).status_code == 200
            runs.append(client.model_id)
    page = open_page(server.url, f"/console/runs/{runs[0]}?compare={','.join(runs[1:])}")
    score = chart(page, "score")
    expect(score).to_have_attribute("data-points", " ".join(["10"] * 6))
    page.get_by_label("mean over seeds").check()
    expect(score).to_have_attribute("data-points", "10 10")
    last = [float(value) for value in score.get_attribute("data-last").split()]
    assert last == pytest.approx([0.1 * 9 + 1, 0.2 * 9 + 1])
    expect(score.locator(".chart-value").first).to_have_text("1.9 ± 1")
    page.get_by_label("Legend").select_option("fields")
    expect(page.locator(".run-legend li")).to_have_text(["rate=0.1 (3 runs)", "rate=0.2 (3 runs)"])
    expect(page).to_have_url(re.compile(r"seeds=1"))
    page.get_by_label("Horizontal axis").select_option("elapsed")  # runs are not in step there
    expect(page.locator(".run-legend li")).to_have_count(6)
