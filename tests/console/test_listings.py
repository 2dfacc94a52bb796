"""Checkpoints, sessions and usage: what is listed, found, downloaded and summed up; hostile names stay text."""

import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Page, expect

import lorimer
from tests.conformance.servers import create_key
from tests.server.traces import check_trace

from .conftest import MODEL, PHONE

HOSTILE = "<img src=x onerror=\"document.body.innerHTML='taken'\">"
STEPS = 2


def save_some(client: lorimer.TrainingClient) -> dict[str, str]:
    """One of each kind, the sampler's with hostile metadata; paths by name."""
    return {
        "first": client.save_state("first").result().path,
        "best": client.save_weights_for_sampler("best", user_metadata={"note": HOSTILE}).result().path,
        "short": client.save_weights_for_sampler("short", ttl_seconds=3600).result().path,
        "spare": client.save_weights_for_sampler("spare").result().path,
    }


@pytest.fixture(scope="module")
def carol(keyed) -> str:
    """The key of a user of her own, so that her totals are known."""
    return create_key(keyed.data, "carol")


@pytest.fixture(scope="module")
def run(keyed, carol, trainer) -> lorimer.TrainingClient:
    """A run of a session whose every text is hostile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TAGS", f"blue,{HOSTILE}")
        client = trainer.run(
            keyed.url,
            key=carol,
            display_name=f"My {HOSTILE}",
            user_metadata={"owner": HOSTILE},
            run_metadata={"what": HOSTILE},
        )
    trainer.train(client, STEPS)
    return client


@pytest.fixture(scope="module")
def saved(run, trainer) -> dict[str, str]:
    return trainer.do(save_some, run)


def no_markup(page: Page) -> None:
    assert page.locator("main img").count() == 0
    assert page.locator("body").inner_text() != "taken"


def test_checkpoints_are_listed_and_searched(keyed, carol, saved, open_page):
    page = open_page(keyed.url, "/console/checkpoints", key=carol)
    rows = page.locator("main tbody tr")
    expect(rows).to_have_count(4)
    expect(page.get_by_role("row").filter(has_text="best")).to_contain_text(f"note: {HOSTILE}")
    no_markup(page)
    ends = page.get_by_role("row").filter(has_text="short").locator("[data-label=Ends]")
    expect(ends).to_contain_text("in 60 min")
    page.keyboard.press("/")
    search = page.get_by_label("Search checkpoints")
    expect(search).to_be_focused()
    search.fill("onerror best")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("status").filter(has_text="checkpoints")).to_contain_text("1 of 4 checkpoints")
    search.fill("no such thing")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()
    name = page.evaluate(
        "fetch('/api/v1/checkpoints', { headers: { 'x-api-key': localStorage['lorimer.key'] } })"
        ".then((answer) => answer.json()).then((found) => found.checkpoints[0].run_name)"
    )
    search.fill(f"{name} best")
    expect(rows).to_have_count(1)
    search.fill("")
    page.get_by_label("Kind").select_option("training")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("first")


def test_a_checkpoint_has_a_page_at_the_address_the_sdk_gives(keyed, carol, saved, open_page):
    address = lorimer.types.SaveWeightsForSamplerResponse(path=saved["spare"]).get_console_url()
    page = open_page(keyed.url, address[address.index("/console") :], key=carol)
    expect(page.get_by_role("heading", name="spare")).to_be_visible()
    page.get_by_role("button", name="Copy", exact=True).first.click()
    assert page.evaluate("navigator.clipboard.readText()") == saved["spare"]
    expect(page.locator("main")).to_contain_text(f'create_sampling_client(model_path="{saved["spare"]}")')
    page.get_by_role("button", name="Publish").click()
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    expect(page.locator("main .facts")).to_contain_text("published")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "spare.tar"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
    expect(page.get_by_text("3 of 3 checkpoints")).to_be_visible()
    plain = saved["spare"].removeprefix("tinker://")
    page.goto(f"/console/checkpoints/{plain}")
    expect(page.get_by_text("There is no such checkpoint.")).to_be_visible()


def test_others_see_a_published_checkpoint_and_cannot_change_it(keyed, carol, saved, open_page):
    run_id, segment, name = saved["best"].removeprefix("tinker://").split("/")
    place = f"{keyed.url}/api/v1/training_runs/{run_id}/checkpoints/{segment}/{name}/publish"
    assert httpx.post(place, headers={"x-api-key": carol}).status_code == 204
    page = open_page(keyed.url, f"/console/checkpoints/{quote(run_id)}/{segment}%2F{name}", key=keyed.key)
    expect(page.get_by_role("button", name="Download")).to_be_visible()
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)
    expect(page.locator("main")).to_contain_text(HOSTILE)
    no_markup(page)


def test_sessions_show_tags_runs_and_heartbeats_and_a_trace_that_opens(keyed, carol, run, saved, open_page, tmp_path):
    page = open_page(keyed.url, "/console/sessions", key=carol)
    row = page.get_by_role("row").filter(has_text="My <img")
    expect(row).to_contain_text("active")
    expect(row.locator("[data-label=Runs]")).to_have_text("1")
    expect(row.locator(".tag")).to_have_text(["blue", HOSTILE, f"owner: {HOSTILE}"])
    expect(row.locator("[data-label=Heartbeat]")).to_contain_text(re.compile(r"just now|^\d\d s ago"))
    page.get_by_label("Search sessions").fill("nothing like it")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()
    page.get_by_label("Search sessions").fill("my onerror")
    row.get_by_role("link").first.click()
    expect(page.locator("main")).to_contain_text(run.model_id)
    expect(page.locator("main .facts").first).to_contain_text(HOSTILE)
    no_markup(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the trace").click()
    trace = json.loads(Path(download.value.path()).read_text("utf-8"))
    check_trace(trace)
    session_id = run.model_id.partition(":")[0]
    assert trace["otherData"]["session_id"] == session_id
    names = [event["name"] for event in trace["traceEvents"]]
    assert names.count("optim_step") == STEPS
    assert download.value.suggested_filename == f"{session_id}.json"
    told = {"x-api-key": carol}
    name = httpx.get(f"{keyed.url}/api/v1/runs/{quote(run.model_id)}", headers=told).json()["name"]
    page.get_by_role("link", name=name, exact=True).click()
    expect(page).to_have_url(f"{keyed.url}/console/runs/{quote(run.model_id, safe='')}")


def test_a_session_lists_its_failed_requests(keyed, carol, open_page):
    with lorimer.ServiceClient(base_url=keyed.url, api_key=carol) as service:
        training = service.create_lora_training_client(MODEL, rank=4)
        wrong = lorimer.Datum(lorimer.ModelInput.from_ints([1, 2]), {"target_tokens": [3, 999_999_999]})
        with pytest.raises(lorimer.TinkerError):
            training.forward_backward([wrong], "cross_entropy").result()
        session_id = training.model_id.partition(":")[0]
    page = open_page(keyed.url, f"/console/sessions/{session_id}", key=carol)
    failed = page.get_by_role("row").filter(has_text="forward_backward")
    expect(failed).to_contain_text("999999999")
    expect(failed.get_by_role("link")).to_be_visible()


def test_a_session_that_ended_says_how(keyed, carol, open_page):
    headers = {"x-api-key": carol}
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", "display_name": "ending soon"}
    session_id = httpx.post(f"{keyed.url}/api/v1/create_session", json=body, headers=headers).json()["session_id"]
    page = open_page(keyed.url, "/console/sessions?q=ending", key=carol)
    row = page.get_by_role("row").filter(has_text=session_id)
    expect(row).to_contain_text("active")
    ended = {"reason": {"type": "errored"}, "detail": HOSTILE}
    httpx.post(f"{keyed.url}/api/v1/sessions/{session_id}/finish", json=ended, headers=headers)
    expect(row).to_contain_text("errored")  # without reloading
    page.get_by_label("Status").select_option("success")
    expect(row).to_have_count(0)
    page.goto(f"/console/sessions/{session_id}")
    expect(page.locator("main")).to_contain_text(HOSTILE)
    expect(page.get_by_text("This session has made no runs.")).to_be_visible()
    no_markup(page)


def test_a_new_user_learns_what_to_do_next_and_then_what_was_used(keyed, open_page):
    key = create_key(keyed.data, "dan")
    page = open_page(keyed.url, "/console/checkpoints", key=key)
    expect(page.locator(".command")).to_contain_text("save_weights_for_sampler")
    page.goto("/console/sessions")
    expect(page.locator(".command")).to_contain_text("create_lora_training_client")
    page.goto("/console/usage")
    expect(page.locator(".command").first).to_contain_text(f"lorimer demo --base-url {keyed.url}")
    headers = {"x-api-key": key}
    asked = {"model": MODEL, "prompt": "1 + 1 =", "max_tokens": 7, "temperature": 9, "seed": 1}
    used = httpx.post(f"{keyed.url}/v1/completions", json=asked, headers=headers, timeout=60).json()["usage"]
    wait_for_usage(keyed.url, headers)
    page.goto("/console/usage?days=1")
    figures = page.locator(".figure")
    row = page.locator("main [data-row='lorimer/tiny']")
    cached = used["prompt_tokens_details"]["cached_tokens"]
    expected = ["0", str(used["prompt_tokens"] - cached), str(cached), str(used["completion_tokens"]), "0"]
    expect(figures.locator("b")).to_have_text(expected)
    expect(row.locator(".number")).to_have_text(expected)
    hour = datetime.now(UTC).strftime("%Y-%m-%d %H:00")
    expect(page.locator("main tr").filter(has_text=hour).locator(".number")).to_have_text(expected)
    expect(page.get_by_role("img", name="Tokens by hour")).to_be_visible()
    assert page.locator(".bars .bar").count() == 24
    said = page.locator(".bars .bar title").last.text_content()
    assert said.startswith(f"{hour}: {used['total_tokens']} tokens\n")
    page.get_by_label("Bars by").select_option("model")
    expect(page.locator(".bars-key")).to_have_text([MODEL])
    page.get_by_label("Time").select_option("28")
    expect(page.get_by_role("img", name="Tokens by day")).to_be_visible()
    expect(figures.locator("b")).to_have_text(expected)
    expect(page.get_by_text("No checkpoints are kept.")).to_be_visible()


def wait_for_usage(url: str, headers: dict[str, str]) -> None:
    """Until the server has written what was just used."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = {"starting_on": now.isoformat(), "ending_before": (now + timedelta(hours=2)).isoformat()}
    for _ in range(100):
        if httpx.get(f"{url}/api/v1/billing/usage/events", params=hours, headers=headers).json()["data"]:
            return
        time.sleep(0.1)
    raise AssertionError("the usage of a completion is not on account after ten seconds")


def test_storage_is_that_of_the_checkpoints(keyed, carol, saved, open_page):
    page = open_page(keyed.url, "/console/checkpoints", key=carol)
    summary = page.get_by_role("status").filter(has_text="checkpoints,").inner_text()
    count, size = summary.split(" ")[0], summary.partition(", ")[2]
    page.goto("/console/usage")
    row = page.locator("section").filter(has_text="Storage of checkpoints").locator("tbody tr")
    expect(row.locator(".number")).to_have_text([count, size])


def test_full_pages_fit_a_phone(keyed, carol, run, saved, open_page):
    run_id, segment, name = saved["best"].removeprefix("tinker://").split("/")
    one = f"checkpoints/{quote(run_id)}/{segment}%2F{name}"
    page = open_page(keyed.url, "/", key=carol, phone=True)
    for path in ["checkpoints", one, "sessions", f"sessions/{run_id.partition(':')[0]}", "usage", "keys", "signin"]:
        page.goto(f"/console/{path}")
        expect(page.locator(".page")).not_to_have_attribute("aria-busy", "true")
        expect(page.locator(".panel").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
