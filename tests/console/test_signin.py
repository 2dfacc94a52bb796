"""Signing in, being refused, and signing out: what the page says and what the browser keeps."""

from playwright.sync_api import expect

KEPT = "() => Object.fromEntries(Object.entries(localStorage))"


def test_a_wrong_key_is_refused_in_the_servers_words_and_not_kept(keyed, open_page, watch):
    watch.expected.add(401)
    page = open_page(keyed.url, "/console/sessions?q=mine")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    field = page.get_by_label("API key", exact=True)
    expect(field).to_be_focused()
    field.fill("tml-wrong")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("the key is not known, or was revoked")
    expect(field).to_have_attribute("aria-invalid", "true")
    assert page.evaluate(KEPT) == {}
    field.fill(keyed.key)
    field.press("Enter")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    assert page.url == f"{keyed.url}/console/sessions?q=mine", "signing in leads to where one wanted to go"
    assert page.evaluate(KEPT) == {"lorimer.key": keyed.key}


def test_signing_out_forgets_the_key(keyed, open_page, watch):
    watch.expected.add(401)
    page = open_page(keyed.url, "/console/signin", key=keyed.key)
    expect(page.get_by_text("As alice")).to_be_visible()
    expect(page.get_by_text("localStorage")).to_contain_text("until you sign out")
    page.locator("main").get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()
    assert page.evaluate(KEPT) == {}
    page.goto("/console/keys")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_link_cannot_lead_away_through_the_sign_in_page(keyed, open_page, watch):
    watch.expected.add(401)
    page = open_page(keyed.url, "/console/signin")
    for address in ["https://example.com/", "//example.com/", "javascript:alert(1)"]:
        page.goto(f"/console/signin?next={address}")
        page.get_by_label("API key", exact=True).fill(keyed.key)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{keyed.url}/")
        page.evaluate("localStorage.clear()")


def test_an_open_server_has_nothing_to_sign_in_to(server, open_page):
    page = open_page(server.url, "/console/signin")
    expect(page.get_by_text("This server asks for no key")).to_be_visible()
    page.goto("/console/keys")
    expect(page.get_by_text("lorimer key create NAME")).to_be_visible()
    expect(page.get_by_role("button", name="Make key")).to_have_count(0)
