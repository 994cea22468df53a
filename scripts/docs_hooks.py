"""mkdocs hook: pages hold `<!-- generated: NAME -->`; it is replaced by what the source says, so it cannot go stale."""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from kitsune import cli, errors
from kitsune.exits import MEANINGS
from kitsune.knobs import KNOBS, Choice, Exclusion, Knob

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
    return "\n\n".join(command_sections("kitsune", typer.main.get_command(cli.full_app())))


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


GENERATED = {"commands": commands, "error_tree": error_tree, "exit_codes": exit_codes, "knobs": knobs}
