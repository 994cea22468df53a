"""The pictures of the documentation, taken of a run that was really measured.

SCREENSHOTS=docs/assets has them written there; otherwise they are taken, looked at and thrown away.
"""

import os
from pathlib import Path

import pytest

from tests.browser.conftest import sign_in
from tests.browser.runs import some_weeks_of_runs
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep, keep_timeline
from tuner.store.queries.tokens import Scope

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asked = os.environ.get("SCREENSHOTS")
    return ROOT / asked if asked else tmp_path


@pytest.fixture
def page(new_page, site, theme):
    """The page of the run."""
    run = keep(site.database, stories.resnet18_on_an_h200())
    keep_timeline(site.database, run, stories.streams_of_resnet18())
    page = new_page(color_scheme=theme)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto(f"/runs/{run.id}")
    return page


def test_the_top_of_a_run(page, folder, theme):
    assert "times as fast" in page.locator(".headline").inner_text()
    assert page.locator(".chart svg:visible").count() > 3
    taken(page, folder / f"run-{theme}.png")


def test_the_streams_of_its_plan(page, folder, theme):
    streams = page.locator("section", has=page.locator("#timeline-title")).locator("figure")
    path = folder / f"streams-{theme}.png"
    streams.screenshot(path=path)
    assert_picture(path)


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["list", "compare"])
def test_pages_of_several_real_runs(new_page, site, folder, theme, name):
    real = stories.lenet5_on_a_cpu(), stories.measured_on_a_cpu(), stories.resnet18_on_an_h200()
    ids = [keep(site.database, story).id for story in real]
    page = new_page(color_scheme=theme)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto("/runs" if name == "list" else f"/compare?ids={','.join(ids)}")
    path = folder / f"{name}-{theme}.png"
    page.locator("main").screenshot(path=path)
    assert_picture(path)


def test_the_list_of_runs(new_page, site, folder, theme):
    keep(site.database, stories.resnet18_on_an_h200())
    some_weeks_of_runs(site.database)
    page = new_page(color_scheme=theme)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    assert page.locator("tbody tr").count() > 10
    if folder != ASSETS:  # what it shows is made up, so it is no picture for the documentation
        taken(page, folder / f"runs-{theme}.png")


def taken(page, path: Path) -> None:
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1280, "height": 900})
    assert_picture(path)


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 20_000, "a page without anything on it"


def test_the_documentation_has_its_pictures():
    shown = {f"{name}-{theme}.png" for name in ("run", "streams", "list", "compare") for theme in ("light", "dark")}
    assert {path.name for path in ASSETS.glob("*.png")} == shown
