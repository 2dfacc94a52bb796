"""The list of runs: live, searched, and several of them chosen to be compared."""

import re

import httpx2
from playwright.sync_api import expect

from tests.conformance.servers import create_key


def test_the_list_is_live_and_searched(server, open_page, trainer):
    first = trainer.run(server.url, run_metadata={"task": "colours"}, display_name="an evening of colours")
    page = open_page(server.url, "/console/runs")
    row = page.locator(f"tr[data-row='{first.model_id}']")
    expect(row).to_contain_text("task: colours")
    expect(row).to_contain_text("an evening of colours")
    expect(row).to_contain_text("active")
    second = trainer.run(server.url, run_metadata={"task": "numbers"})
    other = page.locator(f"tr[data-row='{second.model_id}']")
    expect(other).to_be_visible()
    search = page.get_by_role("searchbox")
    search.fill("COLOURS task")
    expect(other).to_be_hidden()
    expect(row).to_be_visible()
    expect(page).to_have_url(re.compile(r"\?q=COLOURS"))
    page.reload()
    expect(row).to_be_visible()
    expect(other).to_be_hidden()
    search.fill("there is no such run")
    expect(page.get_by_text("No run matches.")).to_be_visible()


def test_ticked_runs_are_compared(server, open_page, trainer):
    clients = [trainer.run(server.url) for _ in range(2)]
    for client, num_steps in zip(clients, (4, 6), strict=True):
        trainer.train(client, num_steps)
    page = open_page(server.url, "/console/runs")
    compare = page.get_by_role("button", name="Compare", exact=False)
    expect(compare).to_be_disabled()
    for client in clients:
        page.get_by_role("checkbox", name=f"Compare {client.model_id}").check()
    page.get_by_role("button", name="Compare 2").click()
    chart = page.locator(".chart[data-metric='loss:sum']")
    expect(chart).to_have_attribute("data-points", "4 6")
    expect(page.locator(".run-legend li")).to_have_count(2)
    page.reload()
    expect(chart).to_have_attribute("data-points", "4 6")
    page.get_by_role("button", name=f"Take {clients[1].model_id} out of the charts").click()
    expect(chart).to_have_attribute("data-points", "4")
    assert "compare" not in page.url
    page.get_by_label("Compare with another run, by its id").fill(clients[1].model_id)
    page.keyboard.press("Enter")
    expect(chart).to_have_attribute("data-points", "4 6")
    assert "compare=" in page.url


def test_a_run_that_is_not_there_is_refused_by_name(server, open_page, watch, trainer):
    watch.expected.add(404)
    client = trainer.run(server.url)
    page = open_page(server.url, f"/console/runs/{client.model_id}?compare=nobody:train:9")
    expect(page.locator(".toast-bad")).to_contain_text("nobody:train:9")
    expect(page.locator(".page-head")).to_contain_text(client.model_id)
    page.goto("/console/runs/nobody:train:9")
    expect(page.get_by_role("heading", name="This page cannot be shown")).to_be_visible()
    expect(page.locator("main")).to_contain_text("nobody:train:9")


def test_of_anothers_run_only_what_is_published_is_shown(keyed, open_page, watch, trainer):
    watch.expected.add(404)
    client = trainer.run(keyed.url, key=keyed.key)
    for name in ("shared", "private"):
        trainer.do(lambda name=name: client.save_weights_for_sampler(name).result())
    address = f"{keyed.url}/api/v1/training_runs/{client.model_id}/checkpoints/sampler_weights/shared/publish"
    assert httpx2.post(address, headers={"x-api-key": keyed.key}).status_code == 204
    page = open_page(keyed.url, f"/console/runs/{client.model_id}", key=create_key(keyed.data, "visitor"))
    row = page.locator("tr[data-checkpoint$='/shared']")
    expect(row.get_by_role("button", name="Copy path")).to_be_visible()
    expect(row.get_by_role("button", name=re.compile("^(Delete|Unpublish|Lifetime)"))).to_have_count(0)
    expect(page.locator("tr[data-checkpoint$='/private']")).to_have_count(0)
    for heading in ("Curves", "Operations"):
        expect(page.get_by_role("heading", name=heading)).to_have_count(0)
