"""The list of runs: live, searched, and several of them chosen to be compared."""

import re

import httpx2
from playwright.sync_api import expect

import lorimer
from tests.conformance.servers import create_key
from tests.console.conftest import train


def test_the_list_is_live_and_searched(server, open_page, trainer):
    first = trainer.run(server.url, run_metadata={"task": "colours"}, display_name="an evening of colours")
    page = open_page(server.url, "/console/runs")
    row = page.locator(f"tr[data-row='{first.model_id}']")
    expect(row).to_contain_text("task: colours")
    expect(row).to_contain_text("an evening of colours")
    expect(row).to_contain_text("running")
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
        page.locator(f"input[data-run='{client.model_id}']").check()
    page.get_by_role("button", name="Compare 2").click()
    chart = page.locator(".chart[data-metric='loss:sum']")
    expect(chart).to_have_attribute("data-points", "4 6")
    expect(page.locator(".run-legend li")).to_have_count(2)
    page.reload()
    expect(chart).to_have_attribute("data-points", "4 6")
    page.get_by_role("button", name=f"Take {clients[1].model_id} out of the charts").click()
    expect(chart).to_have_attribute("data-points", "4")
    expect(page).not_to_have_url(re.compile(r"compare"))
    page.get_by_label("Compare with another run, by its name or id").fill(clients[1].model_id)
    page.keyboard.press("Enter")
    expect(chart).to_have_attribute("data-points", "4 6")
    expect(page).to_have_url(re.compile(r"compare="))


def test_runs_are_grouped_by_each_field_once(server, open_page, trainer):
    trainer.run(server.url, run={"config": {"base_model": "lorimer/tiny", "status": "new", "kind": "sft"}})
    page = open_page(server.url, "/console/runs")
    names = page.get_by_label("Group runs").locator("option")
    expect(names.filter(has_text="by kind")).to_have_count(1)
    told = [name.replace("_", " ") for name in names.all_text_contents()]
    assert {"by base model", "by status"} < set(told) and len(told) == len(set(told))


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


def test_the_list_is_sorted_grouped_and_has_chosen_columns(server, open_page, watch, trainer):
    watch.expected.add(400)
    runs = {
        rank: trainer.run(server.url, run={"name": f"rank {rank}", "tags": ["zoo"], "config": {"rank": rank}})
        for rank in (2, 8, 4)
    }
    page = open_page(server.url, "/console/runs?q=tag%3Dzoo&sort=-config.rank&columns=config.rank")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    assert [rows.nth(n).get_attribute("data-row") for n in range(3)] == [runs[rank].model_id for rank in (8, 4, 2)]
    page.get_by_role("button", name="config.rank ↓").click()
    expect(rows.first).to_contain_text("rank 2")
    expect(page).to_have_url(re.compile(r"sort=config\.rank"))
    page.get_by_role("button", name="Columns").click()
    fields = page.get_by_label("Fields to show")
    fields.fill("FIG.RA")
    page.get_by_role("dialog").get_by_role("button", name="config.rank", exact=True).click()
    expect(fields).to_have_value("config.rank")
    fields.fill("config.rank, last.reward")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_role("button", name="last.reward")).to_be_visible()
    page.get_by_label("Group runs").select_option("config.rank")
    groups = page.locator(".run-group")
    expect(groups).to_have_count(3)
    groups.nth(1).get_by_role("button", name="4").first.click()
    expect(groups.nth(1)).to_contain_text("rank 4")
    page.reload()
    expect(groups).to_have_count(3)
    page.get_by_role("searchbox").fill("lsos<3")
    expect(page.get_by_role("alert")).to_contain_text("there is no field 'lsos'")


def test_a_run_is_edited_archived_and_deleted(server, open_page, watch, trainer):
    client = trainer.run(server.url, run={"name": "before", "config": {"lr": 0.1, "data": {"n": 3}}, "num_steps": 9})
    trainer.train(client, 2)
    page = open_page(server.url, f"/console/training_runs/{client.model_id}")
    head = page.locator(".page-head")
    expect(head).to_contain_text("before")
    expect(page.locator("[data-row=facts]")).to_contain_text("data.n")
    expect(page.locator("[data-row=run]")).to_contain_text("2 of 9")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Name", exact=True).fill("after <b>")
    page.get_by_role("dialog").get_by_label("Tags").fill("one, two")
    page.get_by_role("dialog").get_by_label("Notes").fill("a note")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(head).to_contain_text("after <b>")
    expect(page.locator("[data-row=run]")).to_contain_text("a note")
    expect(page.get_by_role("button", name="Delete run")).to_be_disabled()
    trainer.do(lambda: client.finish_run("failed", "no more water").result())
    expect(page.locator(".run-error")).to_contain_text("no more water")
    page.get_by_role("button", name="Archive", exact=True).click()
    expect(page.get_by_role("button", name="Unarchive")).to_be_visible()
    page.get_by_role("button", name="Delete run").click()
    watch.expected.add(404)  # a poll may be under way
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page).to_have_url(re.compile("/console/runs$"))


def test_a_resumed_run_has_one_page_and_one_curve(server, open_page, trainer):
    first = trainer.run(server.url, run={"name": "resumed", "run_key": "one curve"})
    trainer.train(first, 4)
    state = trainer.do(lambda: first.save_state("four").result().path)
    trainer.do(train, first, 2, first=5)
    page = open_page(server.url, f"/console/runs/{first.model_id}")
    chart = page.locator(".chart[data-metric='loss:sum']")
    expect(chart).to_have_attribute("data-points", "6")

    def resume():
        service = lorimer.ServiceClient(base_url=server.url, api_key="tml-local")
        return service.create_training_client_from_state_with_optimizer(state, run_key="one curve", first_step=5)

    second = trainer.do(resume)
    expect(chart).to_have_attribute("data-points", "4")  # what the new part computes again is superseded
    trainer.do(train, second, 3, first=5)
    for metric in ("loss:sum", "reward"):
        expect(page.locator(f".chart[data-metric='{metric}']")).to_have_attribute("data-points", "7")
    expect(page.locator(".parts li")).to_have_count(2)
    page.goto(f"/console/training_runs/{second.model_id}")
    expect(chart).to_have_attribute("data-points", "7")


def test_compared_runs_are_told_apart(server, open_page, trainer):
    runs = [trainer.run(server.url, run={"name": f"one of {n}", "config": {"lr": n / 10, "same": 1}}) for n in (1, 2)]
    for client in runs:
        trainer.train(client, 2)
    page = open_page(server.url, f"/console/runs/{runs[0].model_id}")
    page.get_by_label("Compare with another run, by its name or id").fill("one of 2")
    page.locator(".found-runs button").first.click()
    legend = page.locator(".run-legend")
    expect(legend).to_contain_text("one of 2")
    table = page.locator(".panel", has=page.get_by_role("heading", name="Differences"))
    expect(table).to_contain_text("lr")
    expect(table).not_to_contain_text("same")
    page.get_by_label("Legend").select_option("fields")
    expect(legend).to_contain_text("lr=0.2")
    page.reload()
    expect(legend).to_contain_text("lr=0.2")
