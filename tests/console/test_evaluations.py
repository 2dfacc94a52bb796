"""Evaluations: the table of checkpoints and tasks, the best of each task, a paired test, scores beside checkpoints."""

import re

import pytest
from playwright.sync_api import expect

import lorimer
from tests.console.conftest import MODEL

ITEMS = [f"q{number}" for number in range(20)]
NAME = "kettle <b>bold</b>"


@pytest.fixture(scope="module")
def paths(server, trainer):
    """Two checkpoints of a run; the second is much better on one task."""
    client = trainer.run(server.url, run={"name": NAME})
    trainer.train(client, 2)

    def evaluate():
        rest = lorimer.RestClient(client.holder.connection)
        saved = [client.save_weights_for_sampler(name).result().path for name in ("first", "second")]
        for place, path in enumerate([*saved, MODEL]):
            right = (5, 17, 5)[place]
            grades = [1.0] * right + [0.0] * (20 - right)
            rest.create_evaluation(path, "sums", ITEMS, grades, settings={"max_tokens": 8}).result()
        for path in saved:
            rest.create_evaluation(path, "ties", ITEMS[:4], [1, 1, 1, 0]).result()
        rest.create_evaluation(saved[0], "chat", ITEMS, [7.0] * 19 + [8.0], metric="rating").result()
        rest.create_evaluation(saved[1], "sums", ITEMS[:4], [1, 1, 0, 0], settings={"max_tokens": 9}).result()
        return saved

    return trainer.do(evaluate)


def test_best_is_marked_and_two_are_compared(server, open_page, paths):
    page = open_page(server.url, "/console/evaluations")
    rows = [page.locator(f"tr[data-row='{path}']").first for path in paths]
    expect(rows[1]).to_contain_text("85.0 %")
    expect(rows[1]).to_contain_text("64.0 \N{EN DASH} 94.8")
    expect(rows[1].get_by_text("best")).to_have_count(1)
    expect(rows[0].get_by_text("best")).to_have_count(0)
    expect(rows[0]).to_contain_text(f"{NAME}, step 2")
    expect(page.get_by_role("columnheader", name="sums")).to_have_count(2)
    expect(page.get_by_text("Choose two rows")).to_have_count(2)
    for row in rows:
        row.get_by_role("checkbox").check()
    result = page.locator("[data-row='sums accuracy']")
    expect(result).to_contain_text("+60.0 points")
    expect(result).to_contain_text("B is better")
    expect(result).to_contain_text("0.00049")  # 2 / 2**12
    expect(result).to_contain_text("McNemar")
    expect(page).to_have_url(re.compile(r"first=tinker"))
    page.reload()
    expect(page.locator("[data-row='sums accuracy']")).to_contain_text("B is better")
    page.get_by_label("Search evaluations").fill("chat")
    expect(page.locator("tr[data-row^='tinker']")).to_have_count(1)


def test_scores_are_beside_checkpoints(server, open_page, paths):
    page = open_page(server.url, "/console/checkpoints")
    row = page.locator(f"[data-checkpoint='{paths[0]}']")
    expect(row).to_contain_text("sums: 25.0 %")
    expect(row).to_contain_text("chat: 7.05")
    row.get_by_role("link", name="first").click()
    expect(page.get_by_role("heading", name="Evaluations")).to_be_visible()
    expect(page.get_by_text("11.2 \N{EN DASH} 46.9")).to_be_visible()
    run = paths[0].removeprefix("tinker://").split("/")[0]
    page.goto(f"/console/runs/{run}")
    expect(page.locator(f"[data-checkpoint='{paths[1]}']")).to_contain_text("sums: 85.0 %")


def test_a_phone_shows_every_score(server, open_page, paths):
    page = open_page(server.url, "/console/evaluations", phone=True, scheme="dark")
    expect(page.locator(f"tr[data-row='{paths[1]}']")).to_contain_text("85.0 %")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
