"""The list of checkpoints: chosen together, sorted, with a metric at the step of each."""

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

import lorimer
from tests.conformance.servers import create_key
from tests.server.processes import eventually

STEPS = (1, 3, 5)


@pytest.fixture(scope="module")
def dora(keyed) -> str:
    """The key of a user of her own, so that her checkpoints are known."""
    return create_key(keyed.data, "dora")


@pytest.fixture(scope="module")
def client(keyed, dora, trainer) -> lorimer.TrainingClient:
    return trainer.run(keyed.url, key=dora, run={"name": "brown-owl"})


@pytest.fixture(scope="module")
def saved(keyed, dora, trainer, client) -> dict[str, str]:
    """Checkpoints after 1, 3 and 5 steps with a metric that falls and rises again; paths by name."""
    paths = trainer.do(train_and_save, client)
    eventually(lambda: "score" in metric_names(keyed, dora), "the summary of the run")
    return paths


def train_and_save(client: lorimer.TrainingClient) -> dict[str, str]:
    tokens = client.get_tokenizer().encode("My favourite colour is green, of course.")
    datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    paths = {}
    for step in range(1, 6):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(lorimer.AdamParams(learning_rate=1e-3)).result()
        client.log_metrics({"score": (step - 3) ** 2 + step / 100}, step=step).result()
        if step in STEPS:
            paths[f"at-{step}"] = client.save_weights_for_sampler(f"at-{step}").result().path
    return paths


def metric_names(keyed, key: str) -> list[str]:
    return httpx.get(f"{keyed.url}/api/v1/run_fields", headers={"x-api-key": key}).json()["metrics"]


def names(page: Page) -> list[str]:
    return [text.strip() for text in page.locator("main tbody [data-label=Checkpoint] a").all_inner_texts()]


def listed(keyed, key: str) -> dict[str, dict]:
    answer = httpx.get(f"{keyed.url}/api/v1/checkpoints?limit=100", headers={"x-api-key": key})
    return {one["tinker_path"]: one for one in answer.json()["checkpoints"]}


def test_a_metric_is_shown_at_the_step_of_each_and_sorts_the_list(keyed, dora, saved, open_page):
    page = open_page(keyed.url, "/console/checkpoints", key=dora)
    expect(page.locator("main tbody tr")).to_have_count(3)
    assert names(page) == ["at-5", "at-3", "at-1"], "the newest is first"
    expect(page.locator("[data-label=Run]").first).to_have_text("brown-owl")
    page.get_by_label("Metric beside each checkpoint").select_option("score")
    cells = page.locator("main tbody [data-label=score]")
    expect(cells).to_have_text(["4.05", "0.03", "4.01"])
    page.get_by_role("button", name="score").click()
    expect(cells).to_have_text(["0.03", "4.01", "4.05"])
    page.get_by_role("button", name="score").click()
    expect(cells).to_have_text(["4.05", "4.01", "0.03"])
    page.reload()
    expect(cells).to_have_text(["4.05", "4.01", "0.03"])
    page.get_by_role("button", name="Checkpoint", exact=True).click()
    assert names(page) == ["at-1", "at-3", "at-5"]
    page.goto(f"/console/runs/{listed(keyed, dora)[saved['at-1']]['run_id']}?saved_metric=score")
    expect(cells).to_have_text(["4.05", "0.03", "4.01"])


def test_a_metric_that_was_reported_since_is_offered_when_the_choice_is_opened(
    keyed, dora, saved, trainer, client, open_page
):
    page = open_page(keyed.url, "/console/checkpoints", key=dora)
    select = page.get_by_label("Metric beside each checkpoint")
    expect(select.locator("option[value=score]")).to_have_count(1)
    trainer.do(lambda: client.log_metrics({"later": 7.0}, step=5).result())
    eventually(lambda: "later" in metric_names(keyed, dora), "the summary of the new metric")
    expect(select.locator("option[value=later]")).to_have_count(0)
    select.focus()
    expect(select.locator("option[value=later]")).to_have_count(1)
    select.select_option("later")
    expect(page.locator("main tbody [data-label=later]")).to_have_text(["7", "\u2013", "\u2013"])


def test_a_phone_sorts_by_step_and_searches_by_the_name_of_the_run(keyed, dora, saved, open_page):
    page = open_page(keyed.url, "/console/checkpoints?q=brown-owl", key=dora, phone=True)
    expect(page.locator("main tbody tr")).to_have_count(3)
    page.get_by_label("Sort").select_option("step")
    expect(page.locator("main tbody [data-label=Step]")).to_have_text(["1", "3", "5"])
    page.get_by_label("Sort").select_option("-step")
    expect(page.locator("main tbody [data-label=Step]")).to_have_text(["5", "3", "1"])


def test_chosen_checkpoints_are_published_expire_and_are_deleted_together(keyed, dora, saved, open_page):
    page = open_page(keyed.url, "/console/checkpoints", key=dora)
    for name in ("at-1", "at-3"):
        page.get_by_label(f"Choose {saved[name]}").check()
    size = sum(listed(keyed, dora)[saved[name]]["size_bytes"] for name in ("at-1", "at-3"))
    total = f"{float(f'{size / (1e6 if size >= 1e6 else 1e3):.3g}'):g} {'MB' if size >= 1e6 else 'kB'}"
    expect(page.locator(".bulk")).to_contain_text(re.compile(f"2 chosen, {re.escape(total[:3])}"))
    page.get_by_role("button", name="Publish chosen", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile("Publish 2 checkpoints.*2 checkpoints, .* together", re.S))
    dialog.get_by_role("button", name="Publish").click()
    expect(page.get_by_text("2 of 2 published.")).to_be_visible()
    expect(page.locator("[data-label=Access]")).to_have_text(["private", "published", "published"])
    page.get_by_label("Choose all shown").check()
    page.get_by_role("button", name="Set lifetime").click()
    dialog.get_by_label("Keep them until").select_option("3600")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_text("3 of 3 changed.")).to_be_visible()
    assert all(one["expires_at"] for one in listed(keyed, dora).values())
    expect(page.locator(".bulk")).not_to_contain_text("chosen,")
    for name in ("at-1", "at-5"):
        page.get_by_label(f"Choose {saved[name]}").check()
    page.get_by_role("button", name="Delete chosen").click()
    expect(dialog).to_contain_text("Delete 2 checkpoints?")
    dialog.get_by_role("button", name="Cancel").click()
    assert len(listed(keyed, dora)) == 3
    page.get_by_role("button", name="Delete chosen").click()
    dialog.get_by_role("button", name="Delete 2 checkpoints").click()
    expect(page.get_by_text("2 of 2 deleted.")).to_be_visible()
    expect(page.locator("main tbody tr")).to_have_count(1)
    assert list(listed(keyed, dora)) == [saved["at-3"]]
