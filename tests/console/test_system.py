"""The page of the system over time."""

import re

from playwright.sync_api import expect


def test_the_system_is_drawn_over_time(server, open_page):
    page = open_page(server.url, "/console/system")
    for kind in ("cpu", "memory", "disk", "queue", "tokens"):
        expect(page.locator(f".chart[data-kind='{kind}']")).to_be_visible()
    page.wait_for_function(
        "() => Number(document.querySelector(\"[data-kind='cpu']\").dataset.points.split(' ')[0]) >= 2"
    )
    cpu = page.locator(".chart[data-kind='cpu']")
    expect(cpu.locator(".chart-values")).to_contain_text("machine")
    assert all(0 <= float(value) <= 100 for value in cpu.get_attribute("data-last").split())
    page.get_by_label("Range").select_option("week")
    page.wait_for_url(re.compile("range=week"))
    expect(page.get_by_text(re.compile("a point is 10 min|No sample yet"))).to_have_count(1)
