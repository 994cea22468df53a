"""What README and docs/ show works: Python blocks run, commands exist, generated tables are whole, links lead on.

`<!-- needs: gpu -->` before a Python block (or another need: server, minutes, transformers) has it compiled only.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import table
from kitsune import errors
from kitsune.cli import main
from kitsune.cli.exit_codes import MEANINGS
from kitsune.knobs import KNOBS
from scripts import docs_hooks
from server.app import create_app
from server.http.openapi import document
from server.payloads.problem_types import slug_of
from server.settings import BY_OPTION, ServerSettings
from tuner.store.engine import open_database

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = ("gpu", "server", "minutes", "transformers")

FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\w*)")
NEED = re.compile(r"^<!-- needs: (?P<need>\w+) -->$")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is the number of its first line of text, from 1."""

    page: str
    line: int
    language: str
    text: str
    need: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number, need = 0, ""
    while number < len(lines):
        line = lines[number]
        number += 1
        if match := NEED.match(line.strip()):
            need = match["need"]
        elif match := FENCE.match(line):
            end = next(i for i in range(number, len(lines)) if lines[i].strip() == "```")
            yield Block(page, number + 1, match["language"], "\n".join(lines[number:end]) + "\n", need)
            number, need = end + 1, ""
        elif line.strip():
            need = ""


def all_blocks(language: str) -> list[Block]:
    found = [block for page in PAGES for block in blocks(page.relative_to(ROOT).as_posix(), page.read_text("utf-8"))]
    return [block for block in found if block.language == language]


def script(page_blocks: list[Block]) -> str:
    """The blocks of one page as one program, each at the lines it has on its page, so that tracebacks name them."""
    program: list[str] = []
    for block in page_blocks:
        program += [""] * (block.line - 1 - len(program)) + block.text.splitlines()
    return "\n".join(program) + "\n"


# Python ---------------------------------------------------------------------------------------------------------------

PYTHON = all_blocks("python")


#: Pages that tests/e2e/test_service.py runs whole, beside a server and a worker.
WITH_SERVER = {block.page for block in PYTHON if block.need == "server"}


ALONE = sorted({block.page for block in PYTHON if not block.need} - WITH_SERVER)
#: Each program in a process and a folder of its own, forked from one that has loaded torch: that takes 3 s.
RUN_EACH = """
import os, runpy, sys
import torch._dynamo
for program in sys.argv[1:]:
    if os.fork() == 0:
        folder = os.path.dirname(program)
        os.chdir(folder)
        os.environ["KITSUNE_HOME"] = os.path.join(folder, "home")
        sys.argv[:] = [program]
        sys.path[0] = folder
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open("told", os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each page's program."""
    programs = {page: tmp_path_factory.mktemp("page") / f"{Path(page).stem.replace('-', '_')}.py" for page in ALONE}
    for page, program in programs.items():
        program.write_text(script([block for block in PYTHON if block.page == page and not block.need]), "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", RUN_EACH, *map(str, programs.values())],
        env={name: value for name, value in os.environ.items() if not name.startswith("KITSUNE_")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=220,
        check=True,
    )
    told = [(program.parent / "told").read_text("utf-8") for program in programs.values()]
    codes = map(int, done.stdout.splitlines())
    return dict(zip(ALONE, zip(codes, told, strict=True), strict=True))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ALONE)
def test_python_blocks_run(page, ran):
    code, told = ran[page]
    assert code == 0, f"{page} does not run as printed:\n{told[-4000:]}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_compile(block):
    compile(block.text, str(block), "exec")
    assert not block.need or block.need in NEEDS


# Commands -------------------------------------------------------------------------------------------------------------

SEPARATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "(", ")"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command, without prompt, comments, pipes and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word in SEPARATORS:
                yield words
                words = []
            else:
                words.append(word)
        yield words


def kitsune_commands() -> list[tuple[str, list[str]]]:
    return [
        (str(block), words[1:])
        for block in all_blocks("bash")
        for words in commands(block.text)
        if words and Path(words[0]).name == "kitsune"
    ]


def misuse(command: Any, words: list[str]) -> str | None:
    """What a command line uses that the command does not have, or None. `command` is a typer (click) command."""
    words = list(words)
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    given = 0
    while words:
        word = words.pop(0)
        if word == "--help":
            return None
        if word.startswith("-"):
            name, _, value = word.partition("=")
            if name not in options:
                return f"{command.name} has no option {name}"
            if not options[name].is_flag and not value:
                if not words:
                    return f"{name} of {command.name} needs a value"
                words.pop(0)
        elif subcommands := getattr(command, "commands", None):
            return misuse(subcommands[word], words) if word in subcommands else f"there is no command {word}"
        else:
            given += 1
    if getattr(command, "commands", None) and not getattr(command, "invoke_without_command", False):
        return f"{command.name} needs one of its commands"
    if given > len(arguments) and all(argument.nargs != -1 for argument in arguments):
        return f"{command.name} takes {len(arguments)} arguments, {given} are given"
    if given < sum(argument.required for argument in arguments):
        return f"an argument of {command.name} is missing"
    return None


def test_commands_exist():
    command = typer.main.get_command(main.full_app())
    wrong = [f"{where}: {problem}" for where, words in kitsune_commands() if (problem := misuse(command, words))]
    assert not wrong, "\n".join(wrong)


def test_pages_show_the_commands():
    shown = {words[0] for _, words in kitsune_commands() if words}
    assert shown >= {"tune", "runs", "doctor"}


def test_every_block_says_its_language():
    assert [str(block) for block in all_blocks("")] == []


def test_scripts_that_pages_name_can_be_run():
    named = {
        word.removeprefix("./")
        for block in all_blocks("bash")
        for words in commands(block.text)
        for word in words[:1]
        if word.removeprefix("./").startswith(("scripts/", ".ci/"))
    }
    assert named >= {"scripts/demo", "scripts/test", "scripts/check", ".ci/run"}
    assert [path for path in named if not os.access(ROOT / path, os.X_OK)] == []


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    targets = [match["target"] for match in LINK.finditer(page.read_text("utf-8"))]
    assert [to for to in targets if "://" not in to and not (page.parent / to).exists()] == []


def test_every_decision_is_listed():
    pages = {page.name for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    assert pages >= {"0001-packaging-and-names.md", "0002-one-knob-one-file-one-row.md"}
    assert {
        name for name in pages if f"({name})" not in (ROOT / "docs/decisions/README.md").read_text("utf-8")
    } == set()
    assert {name for name in pages if f"decisions/{name}" not in (ROOT / "mkdocs.yml").read_text("utf-8")} == set()


def test_the_knobs_page_shows_every_choice():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "knobs.md").read_text("utf-8"))
    for knob in KNOBS.values():
        section = page.partition(f"## `{knob.name}`\n")[2].partition("\n## ")[0]
        assert knob.needs in section
        for choice, meaning in knob.choices.items():
            assert f"| `{choice}` | {meaning} |" in section
        for exclusion in knob.excludes:
            assert exclusion.reason in section


def test_the_errors_page_draws_the_whole_tree():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "errors.md").read_text("utf-8"))
    ours = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "KitsuneError" in ours
    assert [name for name in ours if not re.search(rf"\b{name}\b", page.partition("```python")[0])] == []


def test_the_command_line_page_shows_every_command_option_and_exit_code():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "cli.md").read_text("utf-8"))
    groups = [("kitsune", typer.main.get_command(main.full_app()))]
    for name, command in groups:
        groups += [(f"{name} {inner}", one) for inner, one in getattr(command, "commands", {}).items()]
    leaves = {name: command for name, command in groups if not getattr(command, "commands", {})}
    assert {"kitsune doctor", "kitsune plan show", "kitsune tune", "kitsune export", "kitsune runs show"} <= set(leaves)
    for name, command in leaves.items():
        section = page.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
        assert command.help.split()[0] in section
        options = [name for one in command.params if one.param_type_name == "option" for name in one.opts]
        assert [name for name in options if f"`{name}`" not in section] == []
    for code, meaning in MEANINGS.items():
        assert f"| {code.value} | {meaning} |" in page


def test_the_http_page_shows_every_route_with_its_parameters_answers_and_scopes():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "reference" / "http.md").read_text("utf-8"))
    with open_database("sqlite://") as database:
        described = document(create_app(database, ServerSettings()))
    assert "/api/v1/runs/{run_id}" in described["paths"]
    everywhere = page.partition("every route may answer ")[2].partition("\n")[0]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            section = page.partition(f"## `{method.upper()} {path}`\n")[2].partition("\n## ")[0]
            assert operation["description"] in section
            for parameter in operation.get("parameters", ()):
                assert f"| `{parameter['name']}`" in section
            for status in operation["responses"]:
                assert f"| {status} |" in section or f"#{slug_of(int(status))})" in everywhere
            scopes = [scope for one in operation.get("security", ()) for scope in one["HTTPBearer"]]
            assert all(f"`{scope}`" in section for scope in scopes)
            assert bool(scopes) == path.startswith("/api") or path == "/metrics"
    for name, schema in described["components"]["schemas"].items():
        section = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert all(f"| `{field}`" in section for field in schema.get("properties", ()))


def test_the_page_for_operators_shows_every_setting_of_the_environment():
    page = docs_hooks.on_page_markdown((ROOT / "docs" / "operating.md").read_text("utf-8"))
    variables = {"KITSUNE_RETENTION_DAYS": "7", "KITSUNE_ACTIVE_RUNS": "8", "KITSUNE_TOKEN_ACTIVE_RUNS": "4"}
    expected = ServerSettings(retention_days=7, active_runs=8, token_active_runs=4)
    assert ServerSettings.from_environment({}, variables) == expected
    for name in set(ServerSettings.model_fields) - BY_OPTION:
        assert f"| `KITSUNE_{name.upper()}` | {ServerSettings.model_fields[name].description} |" in page


def test_environment_variables_in_the_pages_are_read_somewhere():
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    source = "\n".join(
        path.read_text("utf-8") for name in ("kitsune", "tuner", "server") for path in (ROOT / name).rglob("*.py")
    )
    mentioned = set(re.findall(r"\bKITSUNE_([A-Z_]+)\b", text))
    assert mentioned >= {"HOME", "DATABASE_URL", "DISABLE"}
    assert [name for name in mentioned if f"KITSUNE_{name}" not in source and f"{name.lower()}:" not in source] == []


# The readers of this file ---------------------------------------------------------------------------------------------


def test_blocks_carry_their_need_and_their_line():
    text = "a\n\n<!-- needs: gpu -->\n\n```python\nx = 1\n```\ntext\n```bash\nls\n```\n"
    gpu, plain = blocks("page.md", text)
    assert (gpu.line, gpu.language, gpu.text, gpu.need) == (6, "python", "x = 1\n", "gpu")
    assert (plain.line, plain.language, plain.need) == (10, "bash", "")


def test_a_need_ends_at_the_next_text():
    (block,) = blocks("page.md", "<!-- needs: gpu -->\nIn other news\n```python\nx = 1\n```\n")
    assert block.need == ""


def test_a_script_keeps_the_lines_of_its_page():
    first = Block("page.md", 3, "python", "x = 1\n")
    second = Block("page.md", 7, "python", "y = x\nz = y\n")
    assert script([first, second]).splitlines() == ["", "", "x = 1", "", "", "", "y = x", "z = y"]


def test_commands_are_found_between_pipes_and_comments():
    text = "$ kitsune tune a.py:f \\\n  --json | jq .plan  # the plan\nscripts/test && kitsune runs\n"
    found = [words for words in commands(text) if words]
    assert found == [["kitsune", "tune", "a.py:f", "--json"], ["jq", ".plan"], ["scripts/test"], ["kitsune", "runs"]]


@pytest.fixture(scope="module")
def toy() -> Any:
    app = typer.Typer()

    @app.command()
    def tune(workload: str, trials: int = 1, as_json: bool = typer.Option(False, "--json")) -> None:
        """A command with an argument, an option with a value, and a flag."""

    @app.command()
    def runs() -> None:
        """A command without arguments."""

    return typer.main.get_command(app)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tune zoo:mlp --trials 3 --json", None),
        ("tune --trials=3 zoo:mlp", None),
        ("runs", None),
        ("tune --help", None),
        ("", "needs one of its commands"),
        ("tuna zoo:mlp", "no command tuna"),
        ("tune zoo:mlp --trails 3", "no option --trails"),
        ("tune zoo:mlp --trials", "needs a value"),
        ("tune zoo:mlp other", "takes 1 arguments, 2"),
        ("tune --json", "is missing"),
        ("runs zoo:mlp", "takes 0 arguments, 1"),
    ],
)
def test_misuse_is_found(toy, line, problem):
    found = misuse(toy, line.split())
    assert found is None if problem is None else problem in (found or "")


def test_the_table_of_the_readme_is_that_of_the_result_files() -> None:
    assert "\n".join(table.rows()) in PAGES[0].read_text(encoding="utf-8")
