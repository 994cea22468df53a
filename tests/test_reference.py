"""The site: the reference names all that is public and nothing else, generated pages are whole, scripts/docs builds."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path

import griffe
import pytest
import yaml

import kitsune
from benchmarks import memory_table, table, waterfall
from scripts import docs_hooks
from scripts.docs_hooks import RESULTS, relinked

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "reference").glob("*.md"))

DIRECTIVE = re.compile(r"^::: (?P<name>\S+)\n(?P<options>(?:    .*\n)*)", re.MULTILINE)
#: Rooms whose every public name is on a page.
ROOMS = ("kitsune", "kitsune.fusion", "kitsune.memory", "kitsune.profiler")


def directives() -> dict[str, dict[str, object]]:
    """Name that a page has the docstring of -> the options beside it."""
    found = [match for page in PAGES for match in DIRECTIVE.finditer(page.read_text("utf-8"))]
    return {match["name"]: (yaml.safe_load(match["options"]) or {}).get("options", {}) for match in found}


NAMED = directives()


def home_of(room: str, name: str) -> str:
    """Where a public name is defined, as "module.name"."""
    value = getattr(importlib.import_module(room), name)
    return f"{room}.{name}" if isinstance(value, str) else f"{value.__module__}.{value.__qualname__}"


def shown(page: str) -> str:
    return docs_hooks.on_page_markdown((DOCS / page).read_text("utf-8"))


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_a_page(room):
    homes = {name: home_of(room, name) for name in importlib.import_module(room).__all__}
    assert len(homes) > 5
    assert {name: home for name, home in homes.items() if home not in NAMED} == {}


@pytest.mark.parametrize("name", ["autocast", "GradScaler", "AMPConfig", "ScalerStatistics"])
def test_mixed_precision_is_on_a_page(name):
    assert f"kitsune.amp.{name}" in NAMED


def test_every_file_of_kernels_is_on_a_page():
    """A file of kernels is one with a reference; the others hold what kernels share."""
    paths = (ROOT / "kitsune" / "kernels").glob("*.py")
    files = {path.stem for path in paths if "\ndef reference(" in path.read_text("utf-8")}
    assert {"rms_norm", "swiglu"} <= files
    assert {file for file in files if not any(name.startswith(f"kitsune.kernels.{file}.") for name in NAMED)} == set()


@pytest.fixture(scope="module")
def source():
    """What the reader that builds the site reads: no module is imported, since not every machine has triton."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in {name.partition(".")[0] for name in NAMED}:
        loader.load(package)
    return loader.modules_collection


@pytest.mark.parametrize("name", NAMED)
def test_pages_name_what_is_there(source, name):
    found = source[name]
    assert found.docstring or name == "kitsune.__version__"
    members = NAMED[name].get("members") or []
    assert [member for member in members if member not in found.members] == []


def test_no_name_is_on_two_places():
    every = [match["name"] for page in PAGES for match in DIRECTIVE.finditer(page.read_text("utf-8"))]
    assert len(every) == len(NAMED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_names_what_is_there(page):
    for name in re.findall(r"`(kitsune(?:\.\w+)*)`", page.read_text("utf-8")):
        pkgutil.resolve_name(name)


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert len(PAGES) >= 6
    assert [page.name for page in PAGES if f": reference/{page.name}\n" not in text] == []


def test_the_fields_of_a_plan_are_all_there():
    section = shown("reference/kitsune.md").partition("### Fields of `Plan`\n")[2].partition("\n### ")[0]
    fields = kitsune.Plan.model_fields
    assert {"knobs", "evidence"} <= set(fields)
    for name, field in fields.items():
        assert re.search(rf"^\| `{name}` \| `.+` \| {re.escape(field.description or '')} \|$", section, re.MULTILINE)


# Pages that are filled ------------------------------------------------------------------------------------------------


def test_every_mark_is_filled():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    marks = {mark for page in pages for mark in docs_hooks.MARK.findall((DOCS / page).read_text("utf-8"))}
    assert marks == set(docs_hooks.GENERATED)


@pytest.mark.parametrize("page", ["index.md", "benchmarks.md"])
def test_the_table_of_training_steps_is_that_of_the_result_files(page):
    assert "\n".join(table.rows()) in shown(page)
    assert shown(page).count("<svg ") == (1 if page == "index.md" else 2)


def test_the_engine_table_has_every_case():
    page = shown("benchmarks.md")
    cases = table.newest_cases(RESULTS / "engine")
    assert "googlenet/16" in cases
    assert [case for case in cases if f"\n| {case} | " not in docs_hooks.engine_steps()] == []
    assert docs_hooks.engine_steps() in page


def test_the_kernel_table_has_every_kernel_and_the_memory_table_every_case():
    page = shown("benchmarks.md")
    kernels = {case.partition("/")[0] for case in table.newest_cases(RESULTS / "kernels")}
    assert len(kernels) > 10
    assert {name for name in kernels if f"\n| {name} | " not in page} == set()
    assert {case for case in memory_table.newest_peaks() if f"\n| {case} | " not in page} == set()


def test_the_waterfall_is_that_of_the_result_files():
    cases = table.newest_cases(RESULTS / "breakdown")
    picture = waterfall.svg_of({case: waterfall.bars_of(lines) for case, lines in sorted(cases.items())})
    assert (DOCS / "assets" / "breakdown.svg").read_text("utf-8") == picture, "run the command of benchmarks/README.md"


def test_every_figure_says_its_file_and_machine():
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in docs_hooks.machines().splitlines()[2:]]
    told = [
        (suite, case) for suite, _, cases, *_ in rows if not cases.endswith(" of them") for case in cases.split(", ")
    ]
    counted = {suite: len(table.newest_cases(RESULTS / suite)) for suite in ("training_step", "engine", "breakdown")}
    assert {suite: sum(row[0] == suite for row in told) for suite in counted} == counted
    assert {row[0] for row in rows} == set(docs_hooks.SUITES)
    assert [row for row in rows if not (RESULTS / row[0] / row[1].strip("`")).exists() or not all(row)] == []


@pytest.mark.parametrize("suite", ["training_step", "engine", "pools", "kernels", "breakdown"])
def test_sources_are_the_files_that_the_tables_are_from(suite):
    cases = table.newest_cases(RESULTS / suite)
    told = docs_hooks.sources(RESULTS / suite)
    assert sorted(case for _, found in told.values() for case in found) == sorted(cases)
    for name, (_, found) in told.items():
        held = table.newest_cases(only_file(RESULTS / suite, name))
        assert {case: held[case] for case in found} == {case: cases[case] for case in found}


def only_file(folder: Path, name: str) -> Path:
    class One:
        def glob(self, _: str) -> list[Path]:
            return [folder / name]

    return One()  # type: ignore[return-value]


def test_contributing_is_a_page_of_the_site():
    page = shown("contributing.md")
    assert page.startswith("# Contributing\n")
    assert "(decisions/README.md)" in page
    assert "](docs/" not in page


@pytest.mark.parametrize(
    ("link", "mended"),
    [
        ("[a](docs/limits.md)", "[a](limits.md)"),
        ("[a](docs/server.md#what-leaves)", "[a](server.md#what-leaves)"),
        ("[a `b`](docs/decisions/README.md)", "[a `b`](decisions/README.md)"),
        ("[a](benchmarks/README.md)", "a"),
        ("[a](https://example.com/docs/x)", "[a](https://example.com/docs/x)"),
        ("[a](#tests)", "[a](#tests)"),
        ("x[0](1)" + " [a](docs/b.md) [c](LICENSE)", "x0 [a](b.md) c"),
    ],
)
def test_links_are_mended(link, mended):
    assert relinked(link) == mended


# scripts/docs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script, and a set-up and a mkdocs that only tell how they were called."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "docs", tmp_path / "scripts" / "docs")
    for name in ("scripts/setup", ".venv/bin/mkdocs"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{Path(name).name} $PWD" "$@"\n', "utf-8")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def docs(checkout: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "docs", *words], cwd=cwd, capture_output=True, text=True, timeout=150, check=False
    )


def test_the_script_builds_where_it_was_told_to(checkout, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = docs(checkout, "--build", "a site", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"setup {checkout}",
        f"mkdocs {checkout} build --quiet --strict --site-dir {elsewhere}/a site",
    ]


def test_the_script_serves_on_this_machine_only(checkout, tmp_path):
    done = docs(checkout, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    setup, serve = done.stdout.splitlines()
    assert setup == f"setup {checkout}"
    assert serve.startswith(f"mkdocs {checkout} serve ")
    assert "--livereload" in serve
    assert serve.endswith("--dev-addr 127.0.0.1:8000")


@pytest.mark.parametrize("words", [["--build"], ["--bulid", "x"], ["x"], ["--build", "x", "y"], ["--help"]])
def test_the_script_refuses_what_it_does_not_know(checkout, tmp_path, words):
    done = docs(checkout, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: scripts/docs [--build DIR]\n"


def test_the_script_can_be_run_and_is_told_of():
    assert os.access(ROOT / "scripts" / "docs", os.X_OK)
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "scripts/docs" in (ROOT / page).read_text("utf-8")
