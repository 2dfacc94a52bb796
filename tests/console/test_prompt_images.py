"""Images in prompts of the playground, with a model that reads them and one that does not; names of models."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.conformance.servers import RunningServer, running_server
from tests.cookbook import chat_templates

from .conftest import MODEL
from .test_playground import ask, choose

SEEING = "test/seeing"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model that reads images and one that does not."""
    from tests.engine.debug_vision import make_debug_vision_model  # loads torch
    from tests.server.openai.conftest import with_template

    place = tmp_path_factory.mktemp("seeing")
    make_debug_vision_model(place / "model", architecture="qwen3_vl")
    with_template(place / "model", chat_templates.QWEN_VL)
    with running_server(place / "data", [f"{SEEING}={place / 'model'}", MODEL], start_engines="lazy") as running:
        yield running


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    file, data = tmp_path / "photo.png", BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(data, "PNG")
    file.write_bytes(data.getvalue())
    return file


def attach(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add image").click()
    chooser.value.set_files(file)


def test_an_image_is_sent_with_the_prompt_and_stays_in_the_history(seeing, open_page, photo):
    page = open_page(seeing.url, f"/console/playground?model={SEEING}")
    choose(page, Max_tokens="4", Temperature="0")
    attach(page, photo)
    attach(page, photo)
    expect(page.locator(".composer img")).to_have_count(2)
    page.get_by_role("button", name="Remove image 2").click()
    expect(page.locator(".composer img")).to_have_count(1)
    answer = ask(page, "What is this?")
    expect(answer.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".composer img")).to_have_count(0)
    picture = page.locator(".asked img")
    assert picture.evaluate("node => [node.naturalWidth, node.naturalHeight]") == [64, 48]
    page.reload()
    assert page.locator(".asked img").evaluate("node => node.decode().then(() => node.naturalWidth)") == 64
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And now?")
    first = json.loads(sent.value.post_data)["messages"][0]["content"]
    assert [part["type"] for part in first] == ["image_url", "text"]
    assert first[0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_what_cannot_be_read_is_refused_with_a_message(seeing, open_page, photo, tmp_path, watch):
    watch.expected.add(400)
    page = open_page(seeing.url, f"/console/playground?model={MODEL}")
    (tmp_path / "notes.txt").write_text("not a picture")
    attach(page, tmp_path / "notes.txt")
    expect(page.get_by_role("alert")).to_contain_text("notes.txt is text/plain; PNG and JPEG are accepted")
    expect(page.locator(".composer img")).to_have_count(0)
    attach(page, photo)
    answer = ask(page, "What is this?")
    expect(answer.get_by_role("alert")).to_contain_text(f"is an image, which '{MODEL}' does not read")
    page.get_by_role("button", name="Complete", exact=True).click()
    expect(page.get_by_role("button", name="Add image")).to_be_hidden()


def test_a_checkpoint_has_the_name_and_step_of_its_run(server, trainer, open_page):
    client = trainer.run(server.url, run={"name": "green-parrot"})
    trainer.train(client, 2)
    path = trainer.do(lambda: client.save_weights_for_sampler("last").result().path)
    page = open_page(server.url, f"/console/playground?model={MODEL}")
    field = page.get_by_label("Model", exact=True)
    field.click()
    field.fill("parrot")
    page.get_by_role("option", name="green-parrot · step 2 · last").click()
    expect(field).to_have_value("green-parrot · step 2 · last")
    expect(field).to_have_attribute("title", path)
    assert page.evaluate("new URLSearchParams(location.search).get('model')") == path
    page.get_by_role("button", name="Copy path").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == path
    choose(page, Max_tokens="3")
    answer = ask(page, "Hello")
    expect(answer.get_by_role("heading")).to_have_text("green-parrot · step 2 · last")
    expect(answer.get_by_role("heading")).to_have_attribute("title", path)
    page.reload()
    expect(field).to_have_value("green-parrot · step 2 · last")


def test_a_name_that_has_the_whole_text_comes_first(server, open_page, trainer):
    for number in range(2):  # the second is newer, and has a 0 elsewhere
        client = trainer.run(server.url, run={"name": f"plum, seed {number}"})
        trainer.do(lambda one=client: one.save_weights_for_sampler("000060").result())
    page = open_page(server.url, "/console/playground")
    model = page.get_by_role("combobox", name="Model", exact=True)
    model.click()
    model.fill("plum, seed 0")
    expect(page.get_by_role("option")).to_have_count(2)
    expect(page.get_by_role("option").first).to_contain_text("plum, seed 0")
