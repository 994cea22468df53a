"""The view of the time of a step by class of kernels, as given and under the plan, against its floor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.class_tables import ClassTable, ClassTables
from kitsune.launches.planning.kernel_classes import GAP
from kitsune.plan import Plan
from kitsune.timeline import ClassTime, Timeline
from server.charts.drawing import words
from tuner.records import Run

NEVER: Final = "they were not recorded, as the run ended before that or is of an older version of Kitsune"
TO_COME: Final = "they are recorded next"
GIVEN: Final = "As given"
PLANNED: Final = "Under the plan"
ALL: Final = "In all"


@dataclass(frozen=True, slots=True)
class Cells:
    """The launches of one class. `over`: how many times its floor it takes; empty without a floor."""

    count: str
    took: str
    floor: str
    over: str


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class, with cells for each step of the view."""

    name: str
    cells: tuple[Cells, ...]


@dataclass(frozen=True, slots=True)
class ClassView:
    """The table. `steps`: the headings of its groups of columns; empty without a table. `total`: its last row."""

    steps: tuple[str, ...]
    rows: tuple[ClassRow, ...]
    total: ClassRow
    notes: tuple[str, ...]


def class_view(run: Run, plan: Plan, found: ClassTables | None, timeline: Timeline | None) -> ClassView:
    """`found`: what the run recorded, if it did. `timeline`: has the classes under the plan where `found` has none."""
    absent = ClassTable(missing=NEVER if run.status.is_finished else TO_COME)
    tables = dict(_tables(plan, found or ClassTables(given=absent, plan=absent), timeline))
    shown = {step: {each.name: each for each in table.classes} for step, table in tables.items() if table.classes}
    names = sorted({name for each in shown.values() for name in each}, key=lambda name: (-_took_us(shown, name), name))
    return ClassView(
        steps=tuple(shown),
        rows=tuple(ClassRow(name, tuple(cells(each.get(name)) for each in shown.values())) for name in names),
        total=ClassRow(ALL, tuple(cells(summed(tuple(each.values()))) for each in shown.values())),
        notes=tuple(_notes(tables)),
    )


def summed(classes: Sequence[ClassTime]) -> ClassTime:
    """All classes together. A gap belongs to a launch, which is counted in its class."""
    launches = sum(each.launches for each in classes if each.name != GAP)
    return ClassTime(ALL, launches, sum(each.total_us for each in classes), sum(each.floor_us for each in classes))


def cells(each: ClassTime | None) -> Cells:
    """Those of a class that the step does not have are zeros."""
    if each is None:
        return Cells("0", milliseconds(0.0), milliseconds(0.0), "")
    over = words.gain(each.total_us / each.floor_us) if each.floor_us else ""
    return Cells(f"{each.launches:,}", milliseconds(each.total_us), milliseconds(each.floor_us), over)


def milliseconds(value_us: float) -> str:
    """To the microsecond, without the unit."""
    return f"{value_us / 1e3:,.3f}"


def _tables(plan: Plan, found: ClassTables, timeline: Timeline | None) -> Iterator[tuple[str, ClassTable]]:
    """Each step under its heading; a plan without choices is the step as given."""
    yield GIVEN, found.given
    if plan.knobs:
        known = timeline.classes if timeline is not None else ()
        yield PLANNED, ClassTable(classes=known) if known and not found.plan.classes else found.plan


def _took_us(shown: Mapping[str, Mapping[str, ClassTime]], name: str) -> float:
    return sum(each[name].total_us for each in shown.values() if name in each)


def _notes(tables: Mapping[str, ClassTable]) -> Iterator[str]:
    """Why a step has no times, each reason once, and how a recorded step differs."""
    missing = {step: table.missing for step, table in tables.items() if not table.classes}
    for reason in dict.fromkeys(missing.values()):
        steps = " and ".join(step.lower() for step, why in missing.items() if why == reason)
        yield f"No times {steps}: {reason}."
    for step, table in tables.items():
        yield from (f"{step}: {note.removesuffix('.')}." for note in table.notes)
