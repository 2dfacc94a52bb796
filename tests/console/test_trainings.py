"""The page of trainings: settings from the schema, a look at data, a training that is stopped and resumed."""

import json

import pytest
from playwright.sync_api import expect

from tests.console.conftest import MODEL

ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in (2, 7)]


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*ROWS, ROWS[0]]), "utf-8")
    return path


def test_data_are_checked_and_a_training_is_started_stopped_and_resumed(server, open_page, sums):
    page = open_page(server.url, "/console/trainings")
    expect(page.get_by_text("No trainings yet.")).to_be_visible()
    page.get_by_label("Kind", exact=True).select_option("sft")
    expect(page.get_by_label("Model", exact=True)).to_have_value(MODEL)
    expect(page.get_by_label("rank", exact=True)).to_have_attribute("placeholder", "32")
    page.get_by_label("Rows to train on").set_input_files(sums)

    page.get_by_role("button", name="Check data").click()
    report = page.locator("[data-report=sft]")
    expect(report).to_contain_text("1 duplicates")
    expect(report).to_contain_text("is the same as row 1")
    first = report.locator(".data-example").first
    expect(first.locator(".data-token.trained").first).to_be_visible()
    trained = "".join(first.locator(".data-token.trained").all_text_contents())
    assert trained.split("<")[0].strip().isdecimal(), trained

    for name, value in (("rank", "4"), ("batch size", "2"), ("epochs", "200"), ("learning rate", "0.001")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("name", exact=True).fill("from <b>here</b>")
    page.get_by_role("button", name="Start", exact=True).click()
    details = page.locator("[data-training]")
    expect(details).to_contain_text("train/nll")
    row = page.locator("tr[data-row]").first
    expect(row).to_contain_text("running")
    expect(row.get_by_role("link")).to_be_visible()
    row.get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("stopped")
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("running")
    expect(details).to_contain_text("Starts")
    row.get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("stopped")
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name="from <b>here</b>")).to_be_visible()


def test_a_wrong_setting_is_told(server, open_page, sums):
    page = open_page(server.url, "/console/trainings")
    page.get_by_label("Rows to train on").set_input_files(sums)
    page.get_by_text("more settings").click()
    page.get_by_label("renderer name", exact=True).fill("none")
    page.get_by_role("button", name="Dry run").click()
    expect(page.locator("[data-training]")).to_contain_text("there is no renderer 'none'")
    expect(page.locator("tr[data-row]").first).to_contain_text("failed")


def test_a_recipe_is_started(server, open_page):
    page = open_page(server.url, "/console/trainings")
    page.get_by_label("Kind", exact=True).select_option(label="recipe sl_loop")
    expect(page.get_by_label("Rows to train on")).to_be_hidden()
    expect(page.get_by_role("button", name="Dry run")).to_be_hidden()
    page.get_by_label("steps", exact=True).fill("0")
    page.get_by_role("button", name="Start", exact=True).click()
    row = page.locator("tr[data-row]").first
    expect(row).to_contain_text("Invalid value for '--steps'")
    page.get_by_label("steps", exact=True).fill("500")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(row).to_contain_text("running")
    expect(page.locator("[data-training]")).to_contain_text("step 1")
    row.get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("stopped")


def test_a_server_with_keys_says_why_not(keyed, open_page):
    page = open_page(keyed.url, "/console/trainings", key=keyed.key)
    expect(page.get_by_text("This server starts no trainings.")).to_be_visible()
    expect(page.get_by_text("lorimer train sft --config run.yaml")).to_be_visible()


def test_a_dry_run_is_measured_and_a_report_belongs_to_its_rows(server, open_page, sums, tmp_path):
    others = tmp_path / "others.jsonl"
    others.write_text("\n".join(json.dumps(row) for row in ROWS), "utf-8")
    page = open_page(server.url, "/console/trainings")
    page.get_by_label("Kind", exact=True).select_option("sft")
    page.get_by_label("Rows to train on").set_input_files(sums)
    page.get_by_role("button", name="Check data").click()
    expect(page.locator("[data-report=sft]")).to_contain_text("1 duplicates")
    page.get_by_label("Rows to train on").set_input_files(others)
    expect(page.locator("[data-report]")).to_have_count(0)
    page.get_by_label("Rows to train on").set_input_files(sums)
    page.get_by_label("batch size", exact=True).fill("2")
    page.get_by_role("button", name="Dry run").click()
    details = page.locator("[data-training]")
    for text in ("Memory", "of the engine at its peak", "Problems", "1 duplicates", "Learning rate"):
        expect(details).to_contain_text(text)


def test_the_end_of_the_output_is_followed_and_the_result_is_told(server, open_page, sums):
    page = open_page(server.url, "/console/trainings")
    page.get_by_label("Kind", exact=True).select_option("sft")
    page.get_by_label("Rows to train on").set_input_files(sums)
    for name, value in (("batch size", "2"), ("epochs", "10")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_role("button", name="Start", exact=True).click()
    details = page.locator("[data-training]")
    expect(details).to_contain_text("finished")
    expect(details.locator("dt", has_text="test/nll")).to_be_visible()
    output = details.get_by_label("Output")
    expect(output).to_contain_text("step 50/")
    assert output.evaluate("node => node.scrollTop > 0 && node.scrollTop + node.clientHeight >= node.scrollHeight - 1")
