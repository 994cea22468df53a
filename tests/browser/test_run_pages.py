"""The pages of a run, a plan, a model and a comparison as a browser shows them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import sign_in, violations
from tests.store.samples import some_class_tables
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep, keep_class_tables, keep_timeline, keep_trials
from tuner.records import RunStatus
from tuner.store.queries import runs, shares
from tuner.store.queries.tokens import Scope
from tuner.wall_clock import utcnow

PHONE = {"width": 390, "height": 844}


@pytest.fixture
def kept(site):
    """Runs by the name of their story."""
    told = (stories.with_a_gain, stories.measured_on_a_cpu, stories.running, stories.failed, stories.of_hostile_names)
    kept = {story.__name__: keep(site.database, story()) for story in told}
    keep_timeline(site.database, kept["with_a_gain"], stories.branches_on_a_cpu())
    keep_class_tables(site.database, kept["with_a_gain"], some_class_tables())
    return kept


def places(kept) -> list[str]:
    gained, plain = kept["with_a_gain"], kept["measured_on_a_cpu"]
    return [
        *(f"/runs/{run.id}" for run in kept.values()),
        f"/plans/{gained.plan_id}",
        f"/plans/{plain.plan_id}",
        f"/models/{gained.fingerprint}",
        f"/compare?ids={gained.id},{plain.id}",
        f"/compare?ids={gained.id},{plain.id}&all=true",
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("theme", "viewport"),
    [pytest.param("light", None, id="wide", marks=pytest.mark.minutes), pytest.param("dark", PHONE, id="narrow")],
)
def test_every_page_is_accessible_and_fits_its_window(new_page, site, kept, theme, viewport):
    page = new_page(color_scheme=theme)
    if viewport:
        page.set_viewport_size(viewport)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    for place in places(kept):
        page.goto(place)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert violations(page) == [], place
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), place
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if theme == "light" else "rgb(21, 23, 26)")


def test_a_shared_run_and_a_saved_one_are_accessible_too(browser, new_page, site, kept, theme, tmp_path):
    run = kept["with_a_gain"]
    with site.database.begin() as connection:
        _, secret = shares.create(connection, run.id, team="default")
    page = new_page(color_scheme=theme)
    page.goto(f"/shared/{secret}")
    assert "1.32 times as fast" in page.locator(".headline").inner_text()
    assert violations(page) == []
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{run.id}")
    with page.expect_download() as saved:
        page.get_by_role("link", name="page", exact=True).click()
    file = tmp_path / saved.value.suggested_filename
    saved.value.save_as(file)
    assert_stands_alone(browser, file, theme)


def assert_stands_alone(browser, file, theme) -> None:
    """Opened from the disk, without a network: it looks as it should, asks for nothing and complains of nothing."""
    with browser.new_context(color_scheme=theme, offline=True) as context:
        page = context.new_page()
        asked, told = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: told.append(message.text))
        page.goto(file.as_uri())
        assert page.evaluate("getComputedStyle(document.querySelector('.headline')).borderLeftWidth") == "4px"
        assert page.locator(".chart svg:visible").count() == 7
        assert violations(page) == []
        assert (asked, told) == ([file.as_uri()], [])


def test_snippets_are_tabs_for_the_keyboard_without_a_script(new_page, site, kept):
    page = new_page(java_script_enabled=False)
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{kept['with_a_gain'].id}")
    assert page.get_by_text("kitsune.TrainStep(model").is_visible()
    page.get_by_role("radio", name="TrainStep").focus()
    for name, code in (
        ("Drop-in", "kitsune.KitsuneOptimizer(optimizer, plan=plan)"),
        ("Plain loop", "enable_amp=True"),
        ("Command line", "kitsune runs plan"),
    ):
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("radio", name=name).is_checked()
        assert page.locator("pre:visible", has_text=code).count() == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["TrainStep", *(pytest.param(name, marks=pytest.mark.minutes) for name in ("Drop-in", "Plain loop"))]
)
def test_a_snippet_that_is_copied_runs_as_it_is(page, site, name, tmp_path):
    """As a person copies it: what is selected, not what the source of the page says."""
    run, trials, plan = stories.measured_on_a_cpu()
    chosen = plan.model_copy(update={"knobs": {"precision": "bf16", "update": "foreach"}})
    keep(site.database, (run.evolve(plan_id=chosen.plan_id), trials, chosen))
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{run.id}")
    page.get_by_text(name, exact=True).click()
    shown = page.locator("pre:visible", has_text="import kitsune")
    code = shown.evaluate("element => { getSelection().selectAllChildren(element); return getSelection().toString() }")
    program = tmp_path / "copied.py"
    program.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+\.\d+ .*bf16", done.stdout)


@pytest.mark.timeout(500)
def test_commands_that_are_copied_run_as_they_are(page, site, tmp_path, monkeypatch):
    run, trials, plan = stories.measured_on_a_cpu()
    keep(site.database, (run, trials, plan))
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{run.id}")
    page.get_by_text("Command line", exact=True).click()
    commands = page.locator("pre:visible", has_text="kitsune runs plan").inner_text()
    fetch, show, check = commands.strip().splitlines()
    monkeypatch.setenv("KITSUNE_TOKEN", site.secret(Scope.READ))
    for line, status in ((fetch, {0}), (show, {0}), (check, {0, 3})):  # 3: the plan is of another machine
        script = f'PATH="{Path(sys.executable).parent}:$PATH"; {line}'
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode in status, (line, done.stderr)
    assert type(plan).load(tmp_path / "plan.json") == plan


def test_a_run_is_watched_until_it_ends(page, site, kept):
    """What is open and focused stays so when a trial comes."""
    run = kept["running"]
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto(f"/runs/{run.id}")
    assert page.locator("tbody[id^=trial-]").count() == 4
    summary = page.locator("#samples-2 summary")
    summary.click()
    _, trials, _ = stories.running(6)
    keep_trials(site.database, run, [trial.model_copy(update={"run_id": run.id}) for trial in trials[4:]])
    page.locator("#trial-6").wait_for()
    assert page.locator("#samples-2").get_attribute("open") is not None
    assert summary.evaluate("element => element === document.activeElement")
    page.locator("#top", has_text="Measuring trial 7 of 9.").wait_for()
    page.wait_for_function("document.getElementById('announced').textContent === 'Measuring trial 7 of 9.'")
    page.get_by_role("button", name="Cancel the run").click()
    page.get_by_text("cancelled after 6").wait_for()
    with site.database.read() as connection:
        assert runs.get(connection, run.id).status is RunStatus.CANCELLED


def test_a_page_that_is_open_when_the_run_ends_loads_itself_again(page, site, kept):
    run = kept["running"]
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{run.id}")
    with site.database.begin() as connection:
        runs.cancel(connection, run.id, now=utcnow())
    page.get_by_text("cancelled after 4").wait_for()
    assert page.locator("[hx-get]").count() == 0


def test_what_is_typed_outlives_the_end_of_the_run(page, site, kept):
    run = kept["running"]
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto(f"/runs/{run.id}")
    page.get_by_label("Note").fill("half a sentence")
    with site.database.begin() as connection:
        runs.cancel(connection, run.id, now=utcnow())
    page.locator("#outdated").wait_for()
    expect(page.locator("#outdated")).to_be_in_viewport()
    assert page.get_by_label("Note").input_value() == "half a sentence"
    assert violations(page) == []
    page.locator("#notes").get_by_role("button", name="Save").click()
    page.get_by_text("cancelled after 4").wait_for()
    assert page.locator(".said .note").inner_text() == "half a sentence"


def test_without_scripts_no_page_that_loads_itself_again_has_a_text_to_lose(new_page, site, kept):
    page = new_page(java_script_enabled=False)
    sign_in(page, site.secret(Scope.READ, Scope.SUBMIT))
    page.goto(f"/runs/{kept['running'].id}")
    assert not page.get_by_label("Note").is_visible()
    told = page.locator("#notes noscript p")
    assert told.is_visible() and "once the run has ended" in told.text_content()
    page.goto(f"/runs/{kept['with_a_gain'].id}")
    assert page.get_by_label("Note").is_visible()


@pytest.mark.parametrize("has_clipboard", [pytest.param(True, marks=pytest.mark.minutes), False])
def test_a_snippet_is_copied_by_a_button(new_page, site, kept, has_clipboard):
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    if not has_clipboard:  # as by http from another machine
        page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', {get: () => undefined})")
    sign_in(page, site.secret(Scope.READ))
    page.goto(f"/runs/{kept['with_a_gain'].id}")
    box = page.locator(".copied", has_text="kitsune.TrainStep(model")
    box.get_by_role("button", name="Copy").click()
    page.locator("#announced", has_text="Copied").wait_for(state="attached")
    assert violations(page) == []
    reader = new_page(permissions=["clipboard-read", "clipboard-write"])
    reader.goto("/login")
    code = reader.evaluate("navigator.clipboard.readText()")
    assert code.replace("\r\n", "\n").rstrip() == box.locator("code").inner_text().rstrip()


def test_a_long_name_of_a_launch_hides_no_column(page, site, kept):
    run = kept["with_a_gain"]
    sign_in(page, site.secret(Scope.READ))
    for place in (f"/runs/{run.id}", f"/plans/{run.plan_id}"):
        page.goto(place)
        region = page.get_by_role("region", name="Launches that take most of the time")
        region.locator("tbody th").first.evaluate("element => { element.textContent = 'kernel_'.repeat(40) }")
        assert region.evaluate("element => element.scrollWidth <= element.clientWidth"), place
