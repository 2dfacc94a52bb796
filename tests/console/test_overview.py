"""The overview: what it tells somebody new, while a run trains, and of what went wrong."""

import pytest
from playwright.sync_api import expect

import lorimer
from lorimer.errors import LorimerError
from tests.conformance.servers import create_key
from tests.console.conftest import MODEL


def test_somebody_new_is_told_what_to_do_next(keyed, open_page):
    page = open_page(keyed.url, key=create_key(keyed.data, "newcomer"))
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.locator(f"[data-model='{MODEL}']")).to_contain_text("runs of yours")
    expect(page.get_by_text("Nothing waits.")).to_be_visible()
    expect(page.get_by_text("No errors.")).to_be_visible()
    program = page.locator(".command pre").first
    expect(program).to_contain_text(f'base_url="{keyed.url}"')
    page.locator(".command button").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == program.inner_text()
    page.goto("/console/runs")
    expect(page.get_by_text("No run yet.")).to_be_visible()


def test_models_speed_queue_and_errors_are_live(server, open_page, trainer):
    client = trainer.run(server.url)
    page = open_page(server.url)
    model = page.locator(f"[data-model='{MODEL}']")
    expect(model).to_contain_text("ready")
    begun = trainer.begin(train_until_told, client, until := [True])
    try:
        queue = page.locator(".panel", has=page.get_by_role("heading", name="Queue"))
        expect(queue.locator(f"a[title='{client.model_id}']").first).to_be_visible()
        expect(model.locator("[data-speed=training] b")).not_to_have_text("0")
        # The line is drawn anew with every answer, so it is looked up each time.
        page.wait_for_function(
            "line => document.querySelector(line)?.getAttribute('points').split(' ').length >= 3",
            arg=f"[data-model='{MODEL}'] [data-speed=training] polyline",
        )
    finally:
        until.clear()
    begun.result(60)
    with pytest.raises(LorimerError):
        trainer.do(lambda: client.load_state(f"tinker://{client.model_id}/weights/nothing").result())
    expect(page.locator(".panel", has_text="Recent errors")).to_contain_text("weights/nothing")
    expect(page.locator(".panel", has_text="Recent errors")).to_contain_text("rejected request of")
    expect(page.get_by_text("Nothing waits.")).to_be_visible()


def train_until_told(client: lorimer.TrainingClient, until: list[bool]) -> None:
    """Several operations on their way at any time, so that there is a queue to see."""
    tokens = client.get_tokenizer().encode("My favourite colour is green, of course. " * 4)
    datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    while until:
        sent = [client.forward_backward([datum] * 4, "cross_entropy") for _ in range(10)]
        client.optim_step(lorimer.AdamParams(learning_rate=1e-4)).result()
        for future in sent:
            future.result()


def test_archived_runs_are_not_among_the_recent_ones(keyed, open_page, trainer):
    key = create_key(keyed.data, "tidy")
    kept, archived = (trainer.run(keyed.url, key=key, run={"name": name}) for name in ("kept", "put-away"))
    page = open_page(keyed.url, key=key)
    recent = page.locator(".panel", has=page.get_by_role("heading", name="Recent runs"))
    expect(recent).to_contain_text("put-away")
    rest = trainer.do(lambda: lorimer.RestClient(base_url=keyed.url, api_key=key))
    trainer.do(lambda: rest.update_run(archived.model_id, is_archived=True).result())
    expect(recent).not_to_contain_text("put-away")
    expect(recent).to_contain_text("kept")
    trainer.do(lambda: rest.update_run(kept.model_id, is_archived=True).result())
    expect(recent).to_contain_text("No run yet.")
    expect(page.locator(".command pre")).to_have_count(0)
