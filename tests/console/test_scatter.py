"""Runs as points: any field against any metric, of the runs found or ticked."""

import itertools
import re
import secrets

import httpx2
import pytest
from playwright.sync_api import expect

from tests.console.conftest import SECONDS

TAG = f"dots-{secrets.token_hex(4)}"
RATES = [0.001, 0.01, 0.1, 1.0]


@pytest.fixture(scope="module")
def runs(server, trainer) -> list[str]:
    found = []
    for number, rate in enumerate(RATES):
        config = {"rate": rate, "kind": f"k{number % 2}"}
        client = trainer.run(server.url, run={"name": f"dot {rate}", "tags": [TAG], "config": config})
        points = [{"step": step, "values": {"score": number * number + step}} for step in range(2)]
        path = f"{server.url}/api/v1/training_runs/{client.model_id}/metrics"
        assert httpx2.post(path, json={"points": points}, timeout=SECONDS).status_code == 200
        found.append(client.model_id)
    trainer.run(server.url, run={"name": "without a score", "tags": [TAG]})
    return found


def test_points_stand_where_their_values_are(server, open_page, runs):
    query = f"q=tag={TAG}&plot_x=config.rate&plot_y=last.score&plot_colour=config.kind&plot_logx=1"
    page = open_page(server.url, f"/console/runs?{query}")
    dots = page.locator(".scatter a")
    expect(dots).to_have_count(4)
    expect(page.get_by_text("1 without both values above zero is left out")).to_be_visible()
    places = {
        run: tuple(
            float(page.locator(f".scatter a[data-run='{run}'] circle").get_attribute(f"c{axis}")) for axis in "xy"
        )
        for run in runs
    }
    xs, ys = zip(*(places[run] for run in runs), strict=True)
    gaps = [b - a for a, b in itertools.pairwise(xs)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2) and gaps[0] > 50  # a decade each
    rises = [a - b for a, b in itertools.pairwise(ys)]
    assert [rise / rises[0] for rise in rises] == pytest.approx([1, 3, 5], abs=0.1)  # 0, 1, 4, 9
    expect(page.locator(".scatter ~ .run-legend li")).to_have_text(["config.kind k0", "config.kind k1"])
    dots.first.hover()
    expect(page.locator(".scatter-tip")).to_contain_text(re.compile("dot .*last.score"))
    page.locator(f"input[data-run='{runs[1]}']").check()
    expect(dots).to_have_count(1)
    page.evaluate("window.stays = 'the same page'")
    dots.first.click()
    expect(page.locator(".page-head")).to_contain_text(runs[1])
    assert page.evaluate("window.stays") == "the same page"


def test_the_fields_are_chosen_on_the_page_and_kept_in_the_address(server, open_page, runs):
    page = open_page(server.url, f"/console/runs?q=tag={TAG}")
    page.get_by_role("button", name="Scatter").click()
    expect(page.get_by_label("Y", exact=True)).not_to_have_value("")
    page.get_by_label("X", exact=True).select_option("config.kind")  # a text
    page.get_by_label("Y", exact=True).select_option("max.score")
    expect(page.locator(".scatter a")).to_have_count(4)
    page.wait_for_url(re.compile(r"plot_x=config\.kind.*plot_y=max\.score"))
    expect(page.locator(".scatter svg")).to_contain_text("k1")
    page.get_by_role("button", name="Scatter").click()
    expect(page.locator(".scatter")).to_be_hidden()
    expect(page).not_to_have_url(re.compile(r"plot_x"))
