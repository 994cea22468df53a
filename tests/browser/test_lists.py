"""A day of somebody who looks after runs, in a real browser: every page by keyboard or mouse, light and dark, quiet."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import NewPage, Site, sign_in, violations
from tests.browser.runs import some_weeks_of_runs
from tests.unit.kitsune.submission import hostile
from tuner.store.queries import runs, tokens
from tuner.store.queries.tokens import Scope

PLACES = ("/", "/runs", "/runs?sort=gain&status=finished", "/runs?status=cancelled", "/submit", "/tokens", "/nowhere",
          "/runs?status=bogus")  # fmt: skip

TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture
def ada(page: Page, site: Site) -> Page:
    some_weeks_of_runs(site.database)
    sign_in(page, site.secret())
    return page


def filtered(page: Page) -> None:
    """The page that the filters lead to, whole: a click waits only until it begins to come."""
    with page.expect_navigation():
        page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("link", name="All runs")).to_be_visible()


def names(page: Page) -> list[str]:
    return page.locator("tbody th a").all_inner_texts()


def test_who_signs_in_comes_back_to_where_they_were(page: Page, site: Site) -> None:
    page.goto("/runs?status=failed")
    expect(page).to_have_url(re.compile(r"/login\?next=/runs%3Fstatus%3Dfailed$"))
    page.get_by_label("Token").fill("ksn_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("is not valid here")
    page.get_by_label("Token").fill(site.secret())
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.url}/runs?status=failed")
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/"
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{site.url}/login")
    page.goto("/runs")
    expect(page).to_have_url(re.compile("/login"))


def test_the_list_is_filtered_and_sorted_in_its_address(ada: Page) -> None:
    ada.get_by_label("State").select_option("finished")
    ada.get_by_label("GPU").fill("NVIDIA H200")
    ada.get_by_role("button", name="Filter").click()
    expect(ada.locator("tbody tr")).to_have_count(7)
    assert "status=finished" in ada.url and "gpu=NVIDIA+H200" in ada.url
    with ada.expect_navigation():
        ada.get_by_role("link", name="Gain").click()
    expect(ada.locator("[aria-sort=descending]")).to_have_text("Gain ↓")
    best = [
        float(text.removesuffix("\N{MULTIPLICATION SIGN}"))
        for text in ada.locator("td:nth-child(4)").all_inner_texts()
        if text
    ]
    assert best == sorted(best, reverse=True) and len(best) > 2
    ada.get_by_role("link", name="Gain").click()
    expect(ada.locator("[aria-sort=ascending]")).to_have_text("Gain ↑")
    ada.go_back()
    expect(ada.get_by_label("GPU")).to_have_value("NVIDIA H200")
    ada.get_by_role("link", name="All runs").click()
    expect(ada.locator("tbody tr")).to_have_count(14)


def test_the_list_follows_what_happens_and_chosen_runs_stay_chosen(ada: Page, site: Site) -> None:
    row = ada.get_by_role("row").filter(has_text="recommender, nightly")
    expect(row).to_contain_text("queued")
    button = ada.get_by_role("button", name="Compare the chosen runs")
    expect(button).to_be_disabled()
    first, second = ada.get_by_label("Compare googlenet").first, ada.get_by_label("Compare bert (batch 2)").last
    first.check()
    expect(button).to_be_disabled()
    second.check()
    expect(button).to_be_enabled()
    link = row.get_by_role("link")
    link.focus()
    with site.database.begin() as connection:
        runs.cancel(connection, link.get_attribute("href").removeprefix("/runs/"))
    expect(row).to_contain_text("cancelled")
    expect(link).to_be_focused()
    expect(ada.get_by_text(re.compile(r"Updated (just now|\d+.s ago)"))).to_be_visible()
    expect(first).to_be_checked()
    expect(button).to_be_enabled()
    chosen = [first.input_value(), second.input_value()]
    button.click()
    assert ada.url.endswith("/compare?ids=" + "&ids=".join(chosen))
    expect(ada.get_by_role("heading", level=1)).to_have_text("2 runs compared")


def test_no_more_runs_are_compared_than_a_page_has_room_for(page: Page, site: Site) -> None:
    some_weeks_of_runs(site.database, 22)
    sign_in(page, site.secret())
    button = page.get_by_role("button", name="Compare the chosen runs")
    boxes = page.locator("td.choice input")
    for number in range(21):
        boxes.nth(number).check()
    expect(button).to_be_disabled()
    boxes.nth(0).uncheck()
    expect(button).to_be_enabled()


def test_what_a_list_shows_can_be_typed_into_its_filters(ada: Page) -> None:
    for label, text, least in (("Model", "resnet18", 1), ("Model", "NIGHTLY", 1), ("GPU", "H200", 5)):
        ada.get_by_label(label, exact=True).fill(text)
        filtered(ada)
        assert ada.locator("tbody tr").count() >= least, text
        assert "=&" not in ada.url and not ada.url.endswith("=")
        ada.get_by_role("link", name="All runs").click()
    ada.get_by_label("State").select_option("lost")
    ada.get_by_role("button", name="Filter").click()
    expect(ada.locator("tbody td:last-child")).to_have_text(["lost"])
    ada.goto("/runs")
    ada.get_by_text("More filters").click()
    ada.get_by_label("Gain, at least").fill(f"1.5{TIMES}")
    ada.get_by_label("Memory, at most").fill("\N{MINUS SIGN}10 %")
    filtered(ada)
    gains = ada.locator("td:nth-child(4)").all_inner_texts()
    assert gains and all(float(text.removesuffix(TIMES)) >= 1.5 for text in gains)
    ada.get_by_label("Tag").fill("no, tag")
    ada.get_by_role("button", name="Filter").click()
    expect(ada.get_by_label("Tag")).to_have_value("no, tag")
    expect(ada.locator("#tag-error")).to_contain_text("A tag has up to 40 letters")
    expect(ada.get_by_label("Gain, at least")).to_have_value("1.5")
    assert violations(ada) == []


def test_ages_count_on_and_a_silent_server_shows(ada: Page) -> None:
    ada.route("**/fragments/runs*", lambda _: None)  # it is asked, and never answers
    updated = ada.locator("time[data-updated]")
    expect(updated).to_have_text(re.compile(r"([3-9]|\d\d).s ago"))


def test_a_list_reads_as_well_without_scripts(new_page: NewPage, site: Site) -> None:
    some_weeks_of_runs(site.database)
    page = new_page(java_script_enabled=False)
    sign_in(page, site.secret())
    expect(page.locator("tbody tr")).to_have_count(14)
    expect(page.get_by_text(re.compile(r"Updated \d{4}-\d\d-\d\d"))).to_be_visible()
    page.get_by_label("Verdict").select_option("same")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_role("link", name="Tokens").click()
    page.get_by_label("Name").fill("ci")
    page.get_by_role("button", name="Make the token").click()
    expect(page.get_by_label("The new token")).to_have_text(re.compile(r"^ksn_[\w-]{43}$"))


def test_an_archive_is_submitted_by_form(page: Page, site: Site, tmp_path: Path) -> None:
    file = tmp_path / "model.ksn"
    file.write_bytes(hostile.valid().to_bytes())
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT), "/submit")
    expect(page.get_by_role("link", name="Tokens")).to_have_count(0)
    page.get_by_label("Archive").set_input_files(file)
    page.get_by_label("Time").fill("soon")
    page.get_by_role("button", name="Start the run").click()
    expect(page.get_by_label("Time")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Archive").set_input_files(file)
    page.get_by_label("Name").fill("my CNN")
    page.get_by_label("Time").fill("5m")
    page.get_by_label("CPU").check()
    page.get_by_role("button", name="Start the run").click()
    expect(page).to_have_url(re.compile(r"/runs/[0-9a-z]{26}$"))
    page.goto("/runs")
    assert names(page) == ["my CNN"]


def test_tokens_are_made_and_revoked(page: Page, site: Site) -> None:
    sign_in(page, site.secret(), "/tokens")
    page.get_by_label("Name").fill("nightly job")
    page.get_by_label("Team").fill("vision")
    page.get_by_label("It lives").select_option("a year")
    page.get_by_role("button", name="Make the token").click()
    secret = page.get_by_label("The new token").inner_text()
    with site.database.read() as connection:
        assert tokens.authenticate(connection, secret).team == "vision"
    page.get_by_role("row").filter(has_text="nightly job").get_by_text("Revoke").click()
    page.get_by_role("button", name="End it for good", exact=True).locator("visible=true").click()
    expect(page.get_by_role("row").filter(has_text="nightly job")).to_contain_text("revoked")
    with site.database.read() as connection:
        assert tokens.authenticate(connection, secret) is None


def test_the_keyboard_reaches_everything_in_order(ada: Page) -> None:
    ada.keyboard.press("Tab")
    expect(ada.get_by_role("link", name="Skip to the content")).to_be_focused()
    expect(ada.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    ada.keyboard.press("Enter")
    ada.keyboard.press("Tab")
    expect(ada.get_by_label("State")).to_be_focused()
    for _ in range(7):  # four fields, what opens the others, the button, and the region that scrolls
        ada.keyboard.press("Tab")
    ada.keyboard.press("Tab")
    expect(ada.locator("#by-name")).to_be_focused()
    assert ada.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    ada.keyboard.press("Enter")
    expect(ada).to_have_url(re.compile("sort=name"))


@pytest.mark.timeout(400)
def test_no_page_shuts_anybody_out(new_page: NewPage, site: Site, theme: str) -> None:
    page = new_page(color_scheme=theme)
    page.goto("/login")
    assert violations(page) == []
    secret = site.secret()
    sign_in(page, secret)
    found = {}
    for is_empty in (True, False):
        if not is_empty:
            some_weeks_of_runs(site.database)
        for place in PLACES:
            page.goto(place)
            found[place, is_empty] = violations(page)
    assert {where: what for where, what in found.items() if what} == {}
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == (
        "rgb(255, 255, 255)" if theme == "light" else "rgb(21, 23, 26)"
    )


def test_a_violation_would_be_found(page: Page, site: Site) -> None:
    page.goto("/login")
    page.evaluate("document.querySelector('label').remove(); document.documentElement.removeAttribute('lang')")
    assert {"label", "html-has-lang"} <= {line.partition(":")[0] for line in violations(page)}


@pytest.mark.parametrize("width", [pytest.param(390, marks=pytest.mark.minutes), 320])
def test_narrow_screens_scroll_the_table_not_the_page(ada: Page, width: int) -> None:
    ada.set_viewport_size({"width": width, "height": 800})
    for place in PLACES:
        ada.goto(place)
        assert ada.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
