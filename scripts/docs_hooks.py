"""mkdocs hook: pages hold `<!-- generated: NAME -->`; it is replaced by what the source says, so it cannot go stale."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from kitsune import errors
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


GENERATED = {"knobs": knobs, "error_tree": error_tree}
