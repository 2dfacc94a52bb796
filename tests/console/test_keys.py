"""Keys made and revoked in the page, and that the server means it."""

import httpx
from playwright.sync_api import Page, expect

from lorimer.server.control import Quotas, SetQuotas
from lorimer.server.keys import run_key_command
from lorimer.server.settings import Settings
from tests.conformance.servers import create_key

HOSTILE = "<img src=x onerror=\"document.body.innerHTML='taken'\">"


def status_of(url: str, secret: str) -> int:
    return httpx.get(f"{url}/api/v1/whoami", headers={"x-api-key": secret}).status_code


def make(page: Page, name: str) -> str:
    """Make a key; its secret."""
    page.get_by_label("Name").fill(name)
    page.get_by_role("button", name="Make key").click()
    expect(page.locator(".secret")).to_contain_text(name)
    secret = page.locator(".secret .command code").inner_text()
    return secret


def test_a_key_is_shown_once_works_and_ends_when_revoked(keyed, open_page):
    page = open_page(keyed.url, "/console/keys", key=keyed.key)
    secret = make(page, "laptop")
    assert status_of(keyed.url, secret) == 200
    page.locator(".secret").get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == secret
    row = page.get_by_role("row").filter(has_text="laptop")
    expect(row).to_contain_text(f"{secret[:8]}…")
    page.reload()
    expect(row).to_contain_text("valid")
    assert secret not in page.content()
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Cancel").click()
    assert status_of(keyed.url, secret) == 200
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    assert status_of(keyed.url, secret) == 401


def test_the_key_in_use_cannot_be_revoked_here(keyed, open_page):
    page = open_page(keyed.url, "/console/keys", key=keyed.key)
    row = page.get_by_role("row").filter(has_text="in use here")
    expect(row).to_contain_text(f"{keyed.key[:8]}…")
    expect(row.get_by_role("button")).to_have_count(0)


def test_a_hostile_name_is_text(keyed, open_page):
    page = open_page(keyed.url, "/console/keys", key=keyed.key)
    make(page, HOSTILE)
    row = page.get_by_role("row").filter(has_text=HOSTILE)
    row.get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"Revoke {HOSTILE}?")
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    assert page.locator("main img").count() == 0


def test_a_name_that_the_server_refuses_is_told(keyed, open_page, watch):
    watch.expected.add(400)
    page = open_page(keyed.url, "/console/keys", key=keyed.key)
    page.get_by_label("Name").fill("   ")
    page.get_by_role("button", name="Make key").click()
    expect(page.get_by_role("alert")).to_contain_text("1 to 200 characters are accepted")


def test_quotas_are_shown_with_what_is_used(keyed, open_page):
    key = create_key(keyed.data, "erin")
    page = open_page(keyed.url, "/console/keys", key=key)
    expect(page.get_by_role("row").filter(has_text="in use here")).to_be_visible()
    expect(page.locator(".quota")).to_have_count(0)
    quotas = Quotas(max_stored_bytes=20_000_000_000, requests_per_second=50)
    run_key_command(Settings(data=keyed.data), SetQuotas("erin", quotas))
    for path in ("keys", "usage"):
        page.goto(f"/console/{path}")
        expect(page.locator(".quota")).to_contain_text(
            "for all of your keys together: 0 B of the 20.0 GB of checkpoints and rollouts you may store; "
            "50 requests per second."
        )
