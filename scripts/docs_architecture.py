"""The tree of folders and the arrows between them, as Markdown, from the sources and their imports."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests import laws

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("kitsune", "tuner", "server")

#: Folder -> the folders that it imports.
Arrows = Mapping[str, frozenset[str]]


@cache
def modules() -> Mapping[str, laws.Module]:
    return laws.read_modules(ROOT)


def tree() -> str:
    """Each folder of the three packages with the first sentence of its docstring, and its files."""
    sections = (section(package) for package in PACKAGES)
    return "\n\n".join(sections)


def section(package: str) -> str:
    folders = [name for name, module in modules().items() if module.is_package and name.split(".")[0] == package]
    lines = [f"### `{package}/`", "", "| folder | what it is for | files |", "| --- | --- | --- |"]
    return "\n".join([*lines, *map(row, folders)])


def row(folder: str) -> str:
    docstring = ast.get_docstring(modules()[folder].tree) or ""
    meaning = " ".join(docstring.split("\n\n")[0].split())
    files = [name.rpartition(".")[2] for name, module in modules().items() if is_file_of(name, module, folder)]
    return f"| `{folder.replace('.', '/')}` | {meaning} | {' '.join(f'`{name}`' for name in files)} |"


def is_file_of(name: str, module: laws.Module, folder: str) -> bool:
    return not module.is_package and name.rpartition(".")[0] == folder


def arrows(package: str) -> str:
    """The arrows within a package as a Mermaid flowchart, without those that others imply."""
    drawn = reduced(arrows_of(modules(), package))
    lines = [f"    {node_of(one)} --> {node_of(other)}" for one in drawn for other in sorted(drawn[one])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def node_of(folder: str) -> str:
    inner = folder.partition(".")[2] or folder
    return f"{folder.replace('.', '_')}[{inner.replace('.', '/')}]"


def arrows_of(found: Mapping[str, laws.Module], package: str) -> Arrows:
    """Between folders; files at the root of the package are nodes of their own."""
    names = {name for name in found if name.startswith(f"{package}.")}
    targets: dict[str, set[str]] = {laws.folder_of(found[name]): set() for name in sorted(names)}
    for name in names:
        one = laws.folder_of(found[name])
        others = {laws.folder_of(found[target]) for _, target in laws.imports(found[name], found) if target in names}
        targets[one] |= others - {one}
    return {one: frozenset(others) for one, others in targets.items()}


def reduced(drawn: Arrows) -> Arrows:
    """Without arrows to what is reached by another path. The graph has no cycles, which the laws ensure."""
    return {
        one: frozenset(other for other in others if not any(other in reached(drawn, via) for via in others - {other}))
        for one, others in drawn.items()
    }


def reached(drawn: Arrows, start: str) -> frozenset[str]:
    seen, todo = set[str](), list[str](drawn[start])
    while todo:
        folder = todo.pop()
        if folder not in seen:
            seen.add(folder)
            todo.extend(drawn[folder])
    return frozenset(seen)


def figures() -> str:
    """How large the code is, in one sentence."""
    listed = list(modules().values())
    lines = sum(len(module.source.splitlines()) for module in listed)
    lengths = [laws.function_lines(node) for module in listed for node in module.functions]
    mean = sum(lengths) / len(lengths)
    size = f"{len(listed)} files, {lines:,} lines"
    return f"{size}; functions have {mean:.1f} lines in the mean, and {max(lengths)} at most."
