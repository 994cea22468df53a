"""What is shown once, what is asked before it is done, and what a refusal means: in a browser, without scripts too."""

import re

import pytest

from tests.browser.conftest import sign_in, violations
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope

SECRET = re.compile(r"ksn_[\w-]{43}")


@pytest.mark.parametrize("scripts", [True, False])
def test_a_new_token_is_shown_once_and_loading_the_page_again_makes_no_other(new_page, site, scripts):
    page = new_page(java_script_enabled=scripts)
    sign_in(page, site.secret())
    page.goto("/tokens")
    page.get_by_label("Name").fill("ci")
    page.get_by_role("button", name="Make").click()
    page.wait_for_url("**/tokens")
    assert SECRET.search(page.content())
    page.reload()
    assert not SECRET.search(page.content())
    with site.database.read() as connection:
        assert len(tokens.listed(connection)) == 2


def test_a_run_is_deleted_after_a_question_without_scripts(new_page, site):
    run = keep(site.database, stories.with_a_gain())
    page = new_page(java_script_enabled=False)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto(f"/runs/{run.id}")
    button = page.get_by_role("button", name="Delete it for good")
    assert not button.is_visible()
    page.get_by_text("Delete this run").click()
    button.click()
    page.wait_for_url("**/runs")
    assert run.id not in page.content()
    assert page.goto(f"/runs/{run.id}").status == 404


def test_what_a_refusal_means_is_accessible_and_needs_no_token(new_page, theme):
    page = new_page(color_scheme=theme)
    for place in ("/problems", "/problems/quota-exceeded"):
        page.goto(place)
        assert violations(page) == [], place
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), place
