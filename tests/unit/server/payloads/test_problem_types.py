"""Every problem type has a page that needs no token, and a section in the docs."""

import ast
import html
import re
from http import HTTPStatus
from pathlib import Path

import pytest
import typer

import server
from kitsune.cli import main
from scripts import docs_hooks
from server.payloads.problem_types import BY_STATUS, PLACE, TYPES, slug_of
from server.payloads.problems import KINDS, refusal
from server.settings import ServerSettings
from tests.test_docs import misuse
from tests.unit.server.pages.conftest import HTML, assert_page

ROOT = Path(__file__).parents[4]
SOURCES = sorted(Path(server.__file__).parent.rglob("*.py"))
RAISING = ("HTTPException", "refusal", "_unauthorized", "_refuse")


def raised() -> set[int]:
    """The statuses of refusals in the source code of the server."""
    calls = [
        node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    named = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) in RAISING]
    first = [call.args[0] for call in named if call.args]
    return {argument.value for argument in first if isinstance(argument, ast.Constant) and type(argument.value) is int}


def test_every_refusal_has_a_type_of_its_own_status():
    statuses = raised()
    assert statuses >= {400, 401, 403, 408, 413, 415, 421, 429, 431}
    assert {status for status in statuses if status >= 400} <= set(BY_STATUS)
    assert all(TYPES[slug].status == status for status, slug in BY_STATUS.items())


def test_what_the_texts_name_exists():
    text = " ".join(f"{found.means} {found.why} {found.do}" for found in TYPES.values())
    variables = set(re.findall(r"`KITSUNE_(\w+)`", text))
    assert {name.lower() for name in variables - {"TOKEN"}} <= set(ServerSettings.model_fields)
    commands = re.findall(r"`kitsune ([^`]+)`", text)
    assert {words.split()[0] for words in commands} == {"export", "migrate", "runs", "token"}
    app = typer.main.get_command(main.full_app())
    assert [
        words for words in commands if misuse(app, words.split()) not in (None, "an argument of export is missing")
    ] == []


def test_every_error_of_ours_has_a_type():
    assert {kind.slug for kind in KINDS.values()} <= set(TYPES)


def test_no_type_is_never_answered():
    assert set(TYPES) == set(BY_STATUS.values()) | {kind.slug for kind in KINDS.values()}


@pytest.mark.parametrize("status", [status for status in HTTPStatus if status >= 400])
def test_whatever_the_framework_refuses_has_a_type(status):
    problem = refusal(status, "no")
    assert problem.status_code == status
    assert slug_of(status) in TYPES


def test_every_status_of_the_description_has_a_type(client):
    paths = client.get("/openapi.json").json()["paths"].values()
    answers = {int(status) for path in paths for operation in path.values() for status in operation["responses"]}
    assert {status for status in answers if status >= 400} <= set(BY_STATUS)


@pytest.mark.parametrize("slug", TYPES)
def test_a_type_leads_to_its_page(stranger, slug):
    found = TYPES[slug]
    text = assert_page(stranger.get(f"{PLACE}/{slug}", headers=HTML), 200)
    plain = html.unescape(text.replace("<code>", "`").replace("</code>", "`"))
    for words in (found.title, str(found.status), found.means, found.why, found.do):
        assert words in plain
    assert f'href="{PLACE}/{slug}"' in stranger.get(PLACE, headers=HTML).text


def test_a_type_that_an_answer_has_resolves_against_it(stranger):
    """By RFC 9457: a relative reference, resolved against the URL of the request."""
    answer = stranger.get("/api/v1/runs")
    place = answer.url.join(answer.json()["type"])
    assert str(place) == "http://localhost:8537/problems/unauthorized"
    assert "A token is needed" in stranger.get(str(place)).text


def test_what_is_no_type_is_not_there(stranger):
    assert_page(stranger.get(f"{PLACE}/nothing", headers=HTML), 404, "Not found")


def test_the_docs_have_a_section_for_each():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
    for slug, found in TYPES.items():
        section = page.partition(f"## `{slug}`\n")[2].partition("\n## ")[0]
        for words in (found.title, str(found.status), found.means, found.why, found.do):
            assert words in section, slug
