"""Screens and hands: a phone without scrolling sideways, the keyboard alone, both themes, a connection that is lost."""

import re

import pytest
from playwright.sync_api import Page, expect

import lorimer

PAGES = ["", "runs", "playground", "checkpoints", "evaluations", "trainings"]
PAGES += ["sessions", "usage", "replicas", "system", "keys"]
LUMINANCE = """node => {
    const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const part = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((value) => linear(value / 255));
    const of = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
    let ground = node;
    while (/rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    const [a, b] = [of(part(getComputedStyle(node).color)), of(part(getComputedStyle(ground).backgroundColor))];
    return [b, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}"""


@pytest.fixture(scope="module")
def run(server, trainer) -> lorimer.TrainingClient:
    client = trainer.run(
        server.url, display_name="a name of some length", run_metadata={"purpose": "a rather long text " * 8}
    )
    trainer.train(client, 5)
    trainer.do(lambda: client.save_weights_for_sampler("a-checkpoint-with-a-rather-long-name-" + "x" * 60).result())
    return client


def settled(page: Page) -> None:
    expect(page.locator("main h1")).to_be_visible()
    expect(page.locator(".page")).not_to_have_attribute("aria-busy", "true")


def test_a_phone_never_scrolls_sideways(server, open_page, run):
    page = open_page(server.url, phone=True)
    for path in [*PAGES, f"runs/{run.model_id}"]:
        page.goto(f"/console/{path}")
        settled(page)
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, path
        assert page.locator("#nav").is_visible()
    page.locator(".chart[data-metric='loss:sum']").scroll_into_view_if_needed()  # a chart is drawn when it is seen
    expect(page.locator(".chart[data-metric='loss:sum'] canvas")).to_be_visible()
    more = page.get_by_role("button", name="More")
    more.tap()
    page.get_by_role("link", name="Sessions").tap()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="Usage")).to_be_hidden()


WIDTHS = (1280, 1024, 800)
LINES = """node => {
    const texts = [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE);
    const range = document.createRange();
    return texts.map((text) => (range.selectNodeContents(text), range.getClientRects().length));
}"""


def test_names_and_actions_stay_in_view_where_tables_are_wide(server, open_page, trainer):
    config = {
        "normalise_advantages_by_deviation": 1,
        "learning_rate": 0.1,
        "a_field": 1,
        "one_more_field": 1,
        "model": 1,
    }
    client = trainer.run(server.url, run={"name": "a-run-with-a-name-of-usual-length", "config": config})
    trainer.do(lambda: client.save_weights_for_sampler("wide").result())
    columns = ",".join(f"config.{name}" for name in config)
    page = open_page(server.url)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"/console/runs?q={client.model_id}&columns={columns}")
        name = page.locator("td.wide").first
        expect(name).to_be_visible()
        assert name.bounding_box()["width"] >= 150, width
        head, cells = page.locator("thead th").all(), page.locator("tbody tr").first.locator("td").all()
        assert [round(one.bounding_box()["x"]) for one in head] == [round(one.bounding_box()["x"]) for one in cells]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width
        page.goto(f"/console/checkpoints?q={client.model_id}")
        delete = page.get_by_role("button", name=re.compile("^Delete tinker")).first
        expect(delete).to_be_visible()
        table = page.locator(".table").first.bounding_box()
        box = delete.bounding_box()
        assert box["x"] + box["width"] <= table["x"] + table["width"] + 1, width
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width
    page.goto(f"/console/runs/{client.model_id}")
    long_name = page.locator(".facts dt", has_text="normalise_advantages_by_deviation")
    expect(long_name).to_be_visible()
    lines = long_name.evaluate(LINES)
    assert lines == [1] * len(lines) and long_name.bounding_box()["height"] > 25


def test_the_keyboard_alone_reaches_everything(server, open_page, run):
    page = open_page(server.url)
    settled(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type(run.model_id)
    tab_to(page, page.locator(f"a[title='{run.model_id}']"))
    page.keyboard.press("Enter")
    expect(page.locator(".page-head")).to_contain_text(run.model_id)
    tab_to(page, page.get_by_label("log scale"))
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile("log=1"))
    tab_to(page, page.get_by_label("Smoothing"))
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("smooth=0.01"))
    tab_to(page, page.get_by_role("button", name=re.compile("^Delete tinker")))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name=re.compile("^Delete tinker"))).to_be_focused()
    page.go_back()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()


def tab_to(page: Page, target) -> None:
    """Press Tab until the target has the focus, which must be seen."""
    expect(target).to_be_visible()
    for _ in range(120):
        page.keyboard.press("Tab")
        if target.evaluate("node => node === document.activeElement"):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError("Tab does not reach the target")


def test_both_themes_are_readable_and_the_choice_is_kept(server, open_page, run):
    grounds = {}
    for scheme in ("light", "dark"):
        page = open_page(server.url, f"/console/runs/{run.model_id}", scheme=scheme)
        settled(page)
        for selector in (
            "h1",
            ".facts dt",
            ".facts dd",
            "#nav a",
            "#nav a[aria-current]",
            ".badge",
            "td",
            "th",
            "button.danger",
        ):
            ground, contrast = page.locator(selector).first.evaluate(LUMINANCE)
            assert contrast >= 4.5, (scheme, selector)
            grounds[scheme] = ground
    assert grounds["light"] > 0.8 and grounds["dark"] < 0.05
    toggle = page.get_by_role("button", name="Theme: system")
    toggle.click()
    page.get_by_role("button", name="Theme: light").wait_for()
    assert page.locator("body").evaluate(LUMINANCE)[0] > 0.8
    page.reload()
    settled(page)
    assert page.locator("body").evaluate(LUMINANCE)[0] > 0.8


def test_a_lost_connection_is_told_and_found_again(server, open_page, watch):
    watch.expected.add("net::ERR_INTERNET_DISCONNECTED")
    page = open_page(server.url)
    settled(page)
    page.context.set_offline(True)
    expect(page.get_by_text("connection lost")).to_be_visible()
    page.context.set_offline(False)
    expect(page.get_by_text("connection lost")).to_have_count(0)


def test_a_hidden_tab_asks_nothing(server, open_page):
    page = open_page(server.url)
    page.clock.install()
    page.goto("/")
    settled(page)
    with page.expect_request("**/api/v1/overview"):
        page.clock.fast_forward(10_000)
    page.evaluate("window.isAway = true")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => window.isAway })")
    page.wait_for_load_state("networkidle")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):
        page.clock.fast_forward(60_000)
    assert asked == []
    with page.expect_request("**/api/v1/overview"):
        page.evaluate("window.isAway = false; document.dispatchEvent(new Event('visibilitychange'))")
