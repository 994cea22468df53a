"""mkdocs hook: pages hold `<!-- generated: NAME -->`; it is replaced by what the source says, so it cannot go stale."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

# mkdocs loads this file by its path, and neither benchmarks/ nor scripts/ is installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import kernel_table, memory_table, table
from benchmarks.results_file import RESULTS
from kitsune import errors, plan
from kitsune.base.base_record import Record
from kitsune.base.environment import PREFIX
from kitsune.cli import main
from kitsune.cli.exit_codes import MEANINGS
from kitsune.knobs import KNOBS, Choice, Exclusion, Knob
from scripts import docs_architecture, docs_charts
from scripts.http_reference import reference as http_markdown
from server.app import create_app
from server.http.openapi import document
from server.payloads.problem_types import TYPES, ProblemType
from server.settings import BY_OPTION, ServerSettings
from tuner.store.engine import open_database

ROOT = Path(__file__).parent.parent
#: Those that the page of benchmarks quotes.
SUITES = ("training_step", "engine", "pools", "kernels", "breakdown", "memory")
MOST_CASES = 8
MARK = re.compile(r"<!-- generated: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def knobs() -> str:
    """A section for each knob of the table, with its choices."""
    return "\n\n".join(map(knob_section, KNOBS.values()))


def knob_section(knob: Knob) -> str:
    lines = [f"## `{knob.name}`", "", f"{knob.meaning[0].upper()}{knob.meaning[1:]}. Needs: {knob.needs}.", ""]
    lines += ["| choice | what it does |", "| --- | --- |"]
    lines += [f"| `{choice}` | {meaning} |" for choice, meaning in knob.choices.items()]
    if knob.excludes:
        lines += ["", *map(clash, knob.excludes)]
    return "\n".join(lines)


def clash(exclusion: Exclusion) -> str:
    these, others = spelled(exclusion.choices), spelled(exclusion.other_choices)
    return f"- {these} cannot stand beside {others} of `{exclusion.other}`: {exclusion.reason}."


def spelled(choices: Iterable[Choice]) -> str:
    return " or ".join(f"`{choice}`" for choice in choices)


def error_tree() -> str:
    tree = (errors.__doc__ or "").partition("\n")[2]
    return f"```text\n{inspect.cleandoc(tree)}\n```"


def exit_codes() -> str:
    rows = [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])


def commands() -> str:
    """A section for each command, with its arguments and options."""
    return "\n\n".join(command_sections("kitsune", typer.main.get_command(main.full_app())))


def command_sections(name: str, command: Any) -> Iterator[str]:
    """`command` is what typer makes of an app: a command of Click, or a group of them."""
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from command_sections(f"{name} {inner_name}", inner)
    if not getattr(command, "commands", {}):
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join([name, *(one.metavar or one.name.upper() for one in arguments), "[OPTIONS]"])
        lines = [f"## `{name}`", "", f"```text\n{usage}\n```", "", inspect.cleandoc(command.help or ""), ""]
        yield "\n".join(lines + options_table(command))


def options_table(command: Any) -> list[str]:
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if not options:
        return []
    rows = [f"| {', '.join(f'`{name}`' for name in one.opts)} | {one.help or ''} |" for one in options]
    return ["| option | what it does |", "| --- | --- |", *rows]


def plan_records() -> str:
    """A section for each record of a plan, with its fields."""
    records = (plan.Plan, plan.Environment, plan.Evidence, plan.Interval, plan.Numerics)
    return "\n\n".join(map(record_section, records))


def record_section(record: type[Record]) -> str:
    lines = [f"### Fields of `{record.__name__}`", "", "| field | type | what it is |", "| --- | --- | --- |"]
    for name, field in record.model_fields.items():
        kind = re.sub(r"\b[\w.]+\.(?=\w)", "", inspect.formatannotation(field.annotation))
        lines.append(f"| `{name}` | `{kind}` | {field.description or ''} |")
    return "\n".join(lines)


def http_reference() -> str:
    """Of the server as it is here, by its own description."""
    with open_database("sqlite://") as database:
        return http_markdown(document(create_app(database, ServerSettings())))


def server_settings() -> str:
    """What the environment of `kitsune serve` decides."""
    rows = [
        f"| `{PREFIX}{name.upper()}` | {field.description} | {told(field.default)} |"
        for name, field in ServerSettings.model_fields.items()
        if name not in BY_OPTION
    ]
    return "\n".join(["| variable | meaning | default |", "| --- | --- | --- |", *rows])


def told(default: Any) -> str:
    return "unset" if default is None else f"{default:,}" if isinstance(default, int) else f"{default}"


def problem_types() -> str:
    """A section for each problem that a server answers."""
    return "\n\n".join(problem_section(slug, found) for slug, found in TYPES.items())


def problem_section(slug: str, found: ProblemType) -> str:
    parts = (f"## `{slug}`", f"{found.title} ({found.status}). {found.means}", f"**Why.** {found.why}")
    return "\n\n".join((*parts, f"**What to do.** {found.do}"))


def training_steps() -> str:
    return "\n".join(table.rows())


def training_chart() -> str:
    return docs_charts.figure(docs_charts.training_chart(table.newest_cases()))


def engine_steps() -> str:
    """Medians of the engine's arms, the case that gains most on up to four streams first."""
    lines = ["| case | one CUDA graph | 1 stream | up to 4 | up to 8 | graph / up to 4 |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    cases = table.newest_cases(RESULTS / "engine")
    chart = docs_charts.engine_chart(cases)
    for group in chart.groups:
        medians = table.medians_of(cases[group.case])
        times = [f"{medians[arm]:.3g} ms" if arm in medians else "" for arm in docs_charts.ENGINE_ARMS]
        gain = f"{medians['graph'] / medians['k4']:.2f}" if "k4" in medians else ""
        lines.append(f"| {' | '.join([group.case, *times, gain])} |")
    return "\n".join(lines)


def engine_chart() -> str:
    return docs_charts.figure(docs_charts.engine_chart(table.newest_cases(RESULTS / "engine")))


def kernel_times() -> str:
    return "\n".join(kernel_table.table_of(table.newest_cases(RESULTS / "kernels")))


def memory_peaks() -> str:
    return "\n".join(memory_table.table_of(memory_table.newest_peaks()))


def machines() -> str:
    """Every file that a figure of this page is from, and what it says of its machine."""
    lines = ["| suite | file | cases | GPU | driver | torch | CUDA | commit |", "| --- |" + " --- |" * 7]
    for suite in SUITES:
        for name, (machine, cases) in sources(RESULTS / suite).items():
            told = (machine[key] for key in ("gpu", "driver", "torch", "cuda", "kitsune_commit"))
            lines.append(f"| {' | '.join([suite, f'`{name}`', in_short(cases), *told])} |")
    return "\n".join(lines)


def in_short(cases: Sequence[str]) -> str:
    return ", ".join(cases) if len(cases) <= MOST_CASES else f"{len(cases)} of them"


def sources(folder: Path) -> dict[str, tuple[Mapping[str, str], list[str]]]:
    """File -> its environment line, and the cases of which it is the newest file, as `table.newest_cases` finds it."""
    machines, newest = {}, {}
    for name, lines in table.files(folder):
        machines[name] = next(line for line in lines if line["kind"] == "environment")
        newest |= {line["case"].partition(" ")[0]: name for line in lines if line["kind"] in ("case", "figure")}
    return {
        name: (machine, sorted(case for case, file in newest.items() if file == name))
        for name, machine in machines.items()
        if name in newest.values()
    }


def contributing() -> str:
    """CONTRIBUTING.md as a page of the site: links into docs/ lead on, and of others the text stays."""
    return relinked((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def relinked(markdown: str) -> str:
    """Links from the root of the repository, as they are from docs/."""

    def mended(link: re.Match[str]) -> str:
        words, target = link["words"], link["target"]
        if target.startswith("docs/"):
            return f"[{words}]({target.removeprefix('docs/')})"
        return link[0] if "://" in target or target.startswith("#") else words

    return re.sub(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)", mended, markdown)


GENERATED = {
    **{f"arrows_{one}": partial(docs_architecture.arrows, one) for one in docs_architecture.PACKAGES},
    "code_size": docs_architecture.figures,
    "tree": docs_architecture.tree,
    "commands": commands,
    "contributing": contributing,
    "engine_chart": engine_chart,
    "engine_steps": engine_steps,
    "error_tree": error_tree,
    "exit_codes": exit_codes,
    "http_reference": http_reference,
    "kernel_times": kernel_times,
    "knobs": knobs,
    "machines": machines,
    "memory_peaks": memory_peaks,
    "plan_records": plan_records,
    "problem_types": problem_types,
    "server_settings": server_settings,
    "training_chart": training_chart,
    "training_steps": training_steps,
}
