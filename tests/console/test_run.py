"""The page of a run: curves that grow while it trains, how they are drawn, what was done when, and its checkpoints."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

import lorimer
from lorimer.cookbook.run_health import CHECKS
from lorimer.errors import LorimerError
from tests.console.conftest import SECONDS, train


def chart(page: Page, name: str) -> Locator:
    return page.locator(f".chart[data-metric='{name}']")


def num_points(page: Page, name: str) -> int:
    return int(chart(page, name).get_attribute("data-points") or 0)


def wait_for_points(page: Page, name: str, least: int) -> None:
    script = "([name, least]) => Number(document.querySelector(`[data-metric='${name}']`)?.dataset.points) >= least"
    page.wait_for_function(script, arg=[name, least], timeout=SECONDS * 1000)


def test_curves_grow_without_reloading(server, open_page, trainer):
    client = trainer.run(server.url, display_name="growing", run_metadata={"seed": "7"})
    page = open_page(server.url, f"/console/runs/{client.model_id}")
    expect(page.get_by_text("No numbers yet.")).to_be_visible()
    page.evaluate("window.stays = 'the same page'")
    trainer.train(client, 5)
    wait_for_points(page, "loss:sum", 5)
    assert num_points(page, "loss:sum") == 5
    trainer.do(train, client, 15, first=6)
    wait_for_points(page, "loss:sum", 20)
    wait_for_points(page, "reward", 20)
    expect(chart(page, "loss:sum")).to_have_attribute("data-source", "engine")
    expect(chart(page, "reward")).to_have_attribute("data-source", "client")
    expect(chart(page, "loss:sum").locator("canvas")).to_be_visible()
    metrics = trainer.do(lorimer_metrics, server.url, client.model_id)
    assert float(chart(page, "reward").get_attribute("data-last")) == pytest.approx(metrics["reward"])
    assert float(chart(page, "loss:sum").get_attribute("data-last")) == pytest.approx(metrics["loss:sum"])
    assert page.evaluate("window.stays") == "the same page"
    facts = page.locator(".panel", has=page.get_by_role("heading", name="Configuration"))
    for text in ("lorimer/tiny", "seed", "7", "growing"):
        expect(facts).to_contain_text(text)


def lorimer_metrics(url: str, run_id: str) -> dict[str, float]:
    """The last value of each metric, as the SDK reads it."""
    with lorimer.ServiceClient(base_url=url, api_key="tml-local") as service:
        found = service.create_rest_client().get_metrics(run_id).result()
    return {series.name: series.points[-1][2] for series in found.series}


@pytest.fixture(scope="module")
def trained(server, trainer) -> lorimer.TrainingClient:
    client = trainer.run(server.url)
    trainer.train(client, 12)
    trainer.do(lambda: client.log_metrics({"below zero": -1.0}, step=1).result())
    return client


def test_scale_smoothing_axis_and_filter_are_kept_in_the_address(server, open_page, trained):
    page = open_page(server.url, f"/console/runs/{trained.model_id}")
    wait_for_points(page, "loss:sum", 12)
    plain = picture(page)
    page.get_by_label("log scale").check()
    logarithmic = picture(page, other_than=plain)
    page.get_by_label("Smoothing").fill("0.8")
    smoothed = picture(page, other_than=logarithmic)
    page.get_by_label("Horizontal axis").select_option("elapsed")
    picture(page, other_than=smoothed)
    for chosen in ("log=1", "smooth=0.8", "x=elapsed"):
        expect(page).to_have_url(re.compile(re.escape(chosen)))
    page.get_by_label("Filter metrics by name").fill("reward")
    expect(chart(page, "loss:sum")).to_be_hidden()
    expect(chart(page, "reward")).to_be_visible()
    page.reload()
    expect(chart(page, "reward")).to_be_visible()
    expect(chart(page, "loss:sum")).to_be_hidden()
    assert page.get_by_label("log scale").is_checked()
    assert page.get_by_label("Smoothing").input_value() == "0.8"


def picture(page: Page, other_than: str = "") -> str:
    """The canvas of the first chart, once it shows something else than before."""
    script = """before => {
        const now = document.querySelector(".chart:not([hidden]) canvas")?.toDataURL();
        return now && now !== before ? now : null;
    }"""
    found: str = page.wait_for_function(script, arg=other_than).json_value()
    return found


def test_smoothing_is_a_moving_average(server, open_page):
    """Without the pull towards zero that a moving average has at its beginning; gaps stay gaps."""
    page = open_page(server.url)
    script = """async ([values, weight]) => {
        const { smooth } = await import("/console/static/run_metrics.js");
        return smooth(values, weight);
    }"""
    values = [1.0, 3.0, None, 5.0]
    weighted, total, expected = 0.0, 0.0, []
    for value in values:
        if value is not None:
            weighted, total = 0.5 * weighted + 0.5 * value, 0.5 * total + 0.5
        expected.append(None if value is None else weighted / total)
    found = page.evaluate(script, [values, 0.5])
    assert [None if v is None else pytest.approx(v) for v in expected] == found
    assert page.evaluate(script, [values, 0]) == values


def test_operations_are_drawn_and_listed(server, open_page, trained, trainer):
    with pytest.raises(LorimerError):
        trainer.do(lambda: trained.load_state(f"tinker://{trained.model_id}/weights/missing").result())
    page = open_page(server.url, f"/console/runs/{trained.model_id}")
    drawing = page.locator(".timeline")
    for kind in ("forward_backward", "optim_step"):
        expect(drawing.locator("li", has_text=kind)).to_be_visible()
    expect(drawing.locator("rect.failure")).to_have_count(1)
    assert drawing.locator("rect.running").count() >= 24
    table = page.locator(".panel", has=page.get_by_role("heading", name="Operations")).locator("table")
    expect(table).to_contain_text("weights/missing")


def test_checkpoints_are_published_given_an_end_downloaded_and_deleted(server, open_page, trained, trainer):
    path = trainer.do(lambda: trained.save_weights_for_sampler("to-keep").result()).path
    page = open_page(server.url, f"/console/runs/{trained.model_id}")
    row = page.locator(f"tr[data-checkpoint='{path}']")
    expect(row).to_contain_text("never")
    row.get_by_role("button", name="Copy path").click()
    assert page.evaluate("navigator.clipboard.readText()") == path
    row.get_by_role("button", name="Publish").click()
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    expect(row).to_contain_text("published")
    row.get_by_role("button", name="Lifetime").click()
    page.get_by_label("Keep it until").select_option("86400")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(row).to_contain_text("in 24 h")
    with page.expect_download() as downloaded:
        row.get_by_role("button", name="Download").click()
    assert downloaded.value.suggested_filename == "to-keep.tar"
    assert b"adapter_config.json" in downloaded.value.path().read_bytes()[:512]
    delete = row.get_by_role("button", name=re.compile("^Delete"))
    delete.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(row).to_be_visible()
    delete.click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_be_hidden()
    assert path not in trainer.do(paths_of, server.url, trained.model_id)


def paths_of(url: str, run_id: str) -> list[str]:
    with lorimer.ServiceClient(base_url=url, api_key="tml-local") as service:
        found = service.create_rest_client().list_checkpoints(run_id).result()
    return [checkpoint.tinker_path for checkpoint in found.checkpoints]


def test_what_went_wrong_is_told_with_what_to_do(server, open_page, trainer):
    client = trainer.run(server.url)
    page = open_page(server.url, f"/console/runs/{client.model_id}")
    told = page.get_by_role("list", name="What went wrong")
    expect(page.get_by_text("No numbers yet.")).to_be_visible()
    expect(told).to_have_count(0)
    for step in range(6):
        marks = {"health/loss_above_start": 1.0} if step in (3, 4) else {}
        rate = {"health/learning_rate": 1.0} if step == 0 else {}
        trainer.do(lambda m=marks, r=rate, s=step: client.log_metrics({"train/nll": 1.0 + s, **m, **r}, s).result())
    expect(told.get_by_role("listitem")).to_have_count(2)
    first, last = told.get_by_role("listitem").all()
    for text in ("loss_above_start", "steps 3 to 4", "begin again with a tenth of it"):
        expect(first).to_contain_text(text)
    for text in ("learning_rate", "step 0", "take the rule's"):
        expect(last).to_contain_text(text)
    known = page.evaluate("import('/console/static/run_health.js').then((found) => Object.keys(found.CONCERNS))")
    assert sorted(known) == sorted([check.__name__ for check in CHECKS] + ["learning_rate"])


def test_the_remaining_time_is_shown_until_the_last_step(server, open_page, trainer):
    client = trainer.run(server.url, run={"num_steps": 3})
    trainer.train(client, 2)
    page = open_page(server.url, f"/console/runs/{client.model_id}")
    facts = page.locator("[data-row=run]")
    expect(facts).to_contain_text("2 of 3")
    expect(facts).to_contain_text("left")
    trainer.do(train, client, 1, first=3)
    expect(facts).to_contain_text("3 of 3")
    expect(facts).not_to_contain_text("left")
