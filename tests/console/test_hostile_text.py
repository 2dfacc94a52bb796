"""Text that tries to be a script, in every field that a user can fill: it is shown, and does nothing."""

from urllib.parse import quote

import httpx2
import numpy as np
import pytest
from playwright.sync_api import Page, expect

import lorimer
from lorimer.errors import LorimerError
from tests.conformance.servers import create_key
from tests.console.conftest import KeyedServer, Trainer, train

MARKUP = "<img src=x onerror=\"window.struck='{0}'\"><script>window.struck='{0}'</script>\"'><b id={0}>"
SHOWN = {
    "/": [],
    "/console/runs": ["display_name", "run_key", "run_value"],
    "/console/sessions": ["display_name", "tag"],
    "/console/checkpoints": ["save_key", "save_value"],
    "/console/usage": [],
    "/console/keys": ["key"],
}
"""Pages, and the fields that each must show as they were written."""
INJECTED = """() => ({
    struck: window.struck ?? null,
    scripts: document.scripts.length,
    images: document.images.length,
    bold: document.querySelectorAll("b[id]").length,
    handlers: [...document.querySelectorAll("*")]
        .flatMap((node) => node.getAttributeNames())
        .filter((name) => name.startsWith("on")).length,
    frames: document.querySelectorAll("iframe, object, embed, base").length,
})"""
CLEAN = {"struck": None, "scripts": 2, "images": 0, "bold": 0, "handlers": 0, "frames": 0}


def hostile(field: str) -> str:
    return MARKUP.format(field)


@pytest.fixture(scope="module")
def attacked(keyed) -> KeyedServer:
    """A server with a user whose name, keys, sessions, runs, metrics and errors all are hostile text."""
    return KeyedServer(keyed.url, keyed.data, create_key(keyed.data, hostile("user")))


def create(attacked: KeyedServer, trainer: Trainer) -> lorimer.TrainingClient:
    return trainer.run(
        attacked.url,
        key=attacked.key,
        user_metadata={hostile("session_key"): hostile("session_value")},
        display_name=hostile("display_name"),
        project_id=hostile("project"),
        run_metadata={hostile("run_key"): hostile("run_value")},
    )


@pytest.fixture(scope="module")
def run(attacked, trainer) -> lorimer.TrainingClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TAGS", hostile("tag"))
        client = create(attacked, trainer)
    answer = httpx2.post(
        f"{attacked.url}/api/v1/keys", json={"name": hostile("key")}, headers={"x-api-key": attacked.key}
    )
    assert answer.status_code == 200
    trainer.do(train, client, 2)
    trainer.do(lambda: client.log_metrics({hostile("metric"): 1.0}, step=1).result())
    trainer.do(lambda: client.save_state("plain", user_metadata={hostile("save_key"): hostile("save_value")}).result())
    inputs = {"target_tokens": [2, 3, 4], hostile("input"): np.ones(3, np.float32)}
    datum = lorimer.Datum(lorimer.ModelInput.from_ints([1, 2, 3]), inputs)
    with pytest.raises(LorimerError, match="<img src=x"):
        trainer.do(lambda: client.forward_backward([datum], "cross_entropy").result())
    return client


def settled(page: Page) -> None:
    expect(page.locator(".page")).not_to_have_attribute("aria-busy", "true")
    expect(page.locator("main h1")).to_be_visible()


@pytest.mark.parametrize("path", SHOWN)
def test_pages_show_it_as_text(attacked, run, open_page, path):
    page = open_page(attacked.url, path, key=attacked.key)
    settled(page)
    for field in SHOWN[path]:
        expect(page.locator("main")).to_contain_text(hostile(field))
    assert page.evaluate(INJECTED) == CLEAN
    expect(page.locator(".who")).to_have_text(hostile("user"))


def test_the_page_of_a_run_shows_it_as_text(attacked, run, open_page):
    page = open_page(attacked.url, f"/console/runs/{run.model_id}", key=attacked.key)
    settled(page)
    for field in ("session_key", "session_value", "display_name", "run_key", "run_value", "metric", "save_key"):
        expect(page.locator("main")).to_contain_text(hostile(field))
    expect(page.locator(".error-text").first).to_contain_text("<img src=x onerror=")
    assert page.evaluate(INJECTED) == CLEAN


def test_the_lookout_sees_and_the_policy_holds(attacked, open_page, watch):
    """Were it taken for HTML, these tests would notice, and even then no script would run."""
    watch.expected |= {"Content Security Policy", "policy script-src", "policy img-src", 401}
    page = open_page(attacked.url, key=attacked.key)
    settled(page)
    page.evaluate("text => { document.querySelector('main').innerHTML = text; }", hostile("planted"))
    page.wait_for_function("() => document.images[0].complete")
    found = page.evaluate(INJECTED)
    assert found == CLEAN | {"scripts": 3, "images": 1, "bold": 1, "handlers": 1}


def test_names_of_checkpoints_are_refused_by_the_server(attacked, run, trainer):
    with pytest.raises(LorimerError, match="cannot name a checkpoint"):
        trainer.do(lambda: run.save_state(hostile("name")).result())


@pytest.mark.parametrize(
    "path",
    [
        "/console/runs/{0}",
        "/console/runs?q={0}",
        "/console/sessions/{0}",
        "/console/checkpoints/{0}/weights%2F{0}",
        "/console/playground?mode=checkpoint&checkpoint={0}",
        "/console/signin?next={0}",
        "/console/{0}",
    ],
)
def test_addresses_are_text_too(attacked, open_page, watch, path):
    watch.expected |= {400, 404}
    address = page_address(path)
    page = open_page(attacked.url, address, key=attacked.key)
    settled(page)
    assert page.evaluate(INJECTED) == CLEAN


def page_address(path: str) -> str:
    return path.format(quote(hostile("address"), safe=""))


def test_a_link_to_sign_in_cannot_lead_elsewhere(attacked, open_page):
    page = open_page(attacked.url, "/console/signin", key=attacked.key)
    for target in (
        "https://example.org/",
        "//example.org",
        "javascript:window.struck=1",
        "/\\example.org",
        "/api/v1/x",
    ):
        page.evaluate("t => dispatchEvent(new CustomEvent('lorimer:signedin', { detail: t }))", target)
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        assert page.url == attacked.url + "/"
        page.goto("/console/signin")
    assert page.evaluate("window.struck ?? null") is None


def test_elements_cannot_be_made_dangerous(attacked, open_page):
    """What pages are made with refuses scripts, handlers that are text, styles and links to elsewhere."""
    page = open_page(attacked.url, key=attacked.key)
    script = """async ([tag, attrs]) => {
        const { h } = await import("/console/static/dom.js");
        try { h(tag, attrs, "<b id=x>"); return "made"; } catch (error) { return "refused"; }
    }"""
    refused = [
        ("script", {}),
        ("iframe", {}),
        ("a", {"href": "javascript:alert(1)"}),
        ("a", {"href": "https://example.org"}),
        ("a", {"href": "//example.org"}),
        ("p", {"onclick": "alert(1)"}),
        ("p", {"style": "color: red"}),
        ("img", {"src": "x"}),
    ]
    for case in refused:
        assert page.evaluate(script, list(case)) == "refused", case
    assert page.evaluate(script, ["a", {"href": "/console/runs"}]) == "made"
    assert page.evaluate(INJECTED) == CLEAN
