"""`kitsune explain`: shows where the time of a step goes, and what several streams could gain."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from kitsune.base.atomic_write import writing
from kitsune.base.text_format import clean, factor
from kitsune.cli import output
from kitsune.cli.output import facts, machine, table
from kitsune.device.backend import environment, make_current, pick_device
from kitsune.errors import KitsuneError
from kitsune.launches.planning.analysis import Analysis, Outlook, analysed, counted, in_ms, outlook
from kitsune.launches.planning.candidates import WAIT_US
from kitsune.launches.plans import Planned
from kitsune.plan import Environment, Match, Plan
from kitsune.runtime.report import Report
from kitsune.timeline import ClassTime
from tuner.child.stream_forecast import LOOKED_AT, rehearse
from tuner.commands.runs import check_writable
from tuner.workloads.loader import load_workload

STREAMS: Final = (1, 2, 4, 8)
MIB: Final = 1024**2
ON_CPU: Final = "streams need a GPU: these times are of this CPU, and show the form of the step, not its speed there"
PLAN_COLUMNS: Final = ("up to", "streams", "launches", "predicted", "gain", "waits", "memory", "idle")
CLASS_COLUMNS: Final = ("class", "launches", "us", "share", "floor us", "over floor", "as given us")
NUMBERS: Final = frozenset((*PLAN_COLUMNS[:-1], *CLASS_COLUMNS[1:], "#", "count"))
CLASSES: Final = (
    "The launches by class; floor: the least time in which this device, as measured, could move their bytes or compute "
    "their products:"
)
LEGEND: Final = (
    "predicted: from the time that each launch takes alone, as if launches side by side did not slow each other; gain: "
    "over one stream; idle: of each stream, the share of the time in which nothing runs on it"
)


def explain(
    spec: str,
    plan: Plan | None,
    *,
    streams: int | None,
    device: str | None,
    pictures: Mapping[str, Path],
    as_json: bool,
) -> None:
    """`streams`: the only number of streams to analyse; `pictures`: "trace" or "svg" -> output file.

    Raises SettingsError when a picture cannot be written, and the errors of `load_workload` and of `rehearse`.
    """
    for kind, path in pictures.items():
        check_writable(path, f"--{kind}")
    place = pick_device(device)
    make_current(place)
    asked = STREAMS if streams is None else (streams,)
    with output.aside():
        found = rehearse(load_workload(spec, str(place)), plan.knobs if plan else {}, max(asked))
        before = classes_as_given(spec, place, found.report) if plan and plan.knobs else ()
    here = environment(place)
    add_notes(found.report, plan, here)
    analysis = analysis_of(found.plans, found.finest, asked)
    for kind, path in pictures.items():
        draw(found.plans[0], kind, path)
    if as_json:
        by_class = {"classes": class_rows(found.classes), "classes_as_given": class_rows(before)}
        output.emit(as_object(spec, here, found.report, analysis) | by_class)
    else:
        show(explain_screen(spec, here, found.report, analysis, class_screen(found.classes, before)))


def classes_as_given(spec: str, device: torch.device, report: Report) -> tuple[ClassTime, ...]:
    """The class times of the step without any choice; empty, with a note, if its launches cannot be recorded."""
    try:
        return rehearse(load_workload(spec, str(device)), {}, 1).classes
    except KitsuneError as error:
        report.note(f"no times of the step as given: {error}")
        return ()


def add_notes(report: Report, plan: Plan | None, here: Environment) -> None:
    if plan is not None and plan.environment is not None:
        match, reason = plan.environment.match(here)
        if match is not Match.EXACT:
            report.note(f"the plan was {reason}")
    if here.device == "cpu":
        report.note(ON_CPU)


def analysis_of(plans: Sequence[Planned], finest: Planned, asked: Sequence[int]) -> Analysis:
    """The analysis of `finest`, with an outlook for each count in `asked` from `plans`, which are quickest first.

    `finest` has the launches in the form for several streams; as recorded, more of them depend on each other.
    """
    fewest = min(plans, key=lambda plan: plan.schedule.streams)  # where the pool is too small for one stream
    quickest = {count: next((plan for plan in plans if plan.schedule.streams <= count), fewest) for count in asked}
    outlooks = [outlook(count, plan.schedule, plan.memory) for count, plan in quickest.items()]
    return analysed(finest.recording.graph, finest.costs_us, outlooks, WAIT_US)


def draw(plan: Planned, kind: str, path: Path) -> None:
    """Raises SettingsError when the file cannot be written."""
    save = plan.save_trace if kind == "trace" else plan.save_svg
    with writing(f"--{kind} {path}"):
        save(path)
    where = counted(len(plan.schedule.used), "stream", "streams")
    output.note(f"The quickest plan by prediction, on {where}, is in {path}")


# On the terminal ------------------------------------------------------------------------------------------------------


def as_object(spec: str, here: Environment, report: Report, analysis: Analysis) -> dict[str, Any]:
    return {
        "workload": spec,
        "environment": here.model_dump(mode="json"),
        "applied": others(report.applied),
        "declined": others(report.declined),
        "notes": report.notes,
        **asdict(analysis),
    }


def others(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Without the knobs that this command analyses itself."""
    return {name: value for name, value in knobs.items() if name not in LOOKED_AT}


def show(parts: Sequence[Any]) -> None:
    console = output.stdout()
    for part in parts:
        console.print(clean(part) if isinstance(part, str) else part)


def explain_screen(
    spec: str, here: Environment, report: Report, analysis: Analysis, classes: Sequence[Any]
) -> list[Any]:
    """All results, for `Console.print`. `classes`: the screen of the launches by class."""
    one_us = next((each.predicted_us for each in analysis.outlooks if each.streams == 1), analysis.sum_us)
    plans = [outlook_row(each, one_us) for each in analysis.outlooks]
    path_us = analysis.critical_us
    links = [
        (str(one.launch), one.name, f"{one.took_us:.1f}", share(one.took_us, path_us)) for one in analysis.critical
    ]
    groups = [(each.name, str(each.count), f"{each.total_us:.1f}", f"{each.share:.0%}") for each in analysis.groups]
    return [
        facts(explain_facts(spec, here, report, analysis)),
        "",
        *classes,
        "",
        table(*PLAN_COLUMNS, rows=plans, right=NUMBERS),
        LEGEND,
        "",
        "The launches that take most of the time, by name:",
        table("launch", "count", "us", "share", rows=groups, right=NUMBERS),
        "",
        "The longest launches of the critical path:",
        table("#", "launch", "us", "share", rows=links, right=NUMBERS),
        "",
        analysis.limit,
    ]


def explain_facts(spec: str, here: Environment, report: Report, analysis: Analysis) -> Iterator[tuple[str, str]]:
    yield "workload", spec
    yield "device", machine(here)
    yield from (("applied", f"{name}={choice}") for name, choice in others(report.applied).items())
    yield from (("declined", f"{name}: {reason}") for name, reason in others(report.declined).items())
    yield from (("note", note) for note in report.notes)
    yield "launches", f"{analysis.launches}, {in_ms(analysis.sum_us)} one after the other"
    path = f"{in_ms(analysis.critical_us)} in {analysis.critical_launches} launches"
    yield "critical path", f"{path}, {share(analysis.critical_us, analysis.sum_us)} of all"
    naive_bytes = max(each.naive_bytes for each in analysis.outlooks)
    yield "memory", f"{in_mib(naive_bytes)} of the step's own, if no memory were reused"


def outlook_row(each: Outlook, one_us: float) -> tuple[str, ...]:
    gain = one_us / each.predicted_us if each.predicted_us else 1.0
    idle = ", ".join(f"{one:.0%}" for one in each.idle)
    times = in_ms(each.predicted_us), factor(gain), str(each.waits)
    return str(each.asked), str(each.streams), str(each.launches), *times, in_mib(each.pool_bytes), idle


def class_screen(classes: Sequence[ClassTime], before: Sequence[ClassTime]) -> list[Any]:
    given_us = {each.name: each.total_us for each in before}
    all_us = sum(each.total_us for each in classes)
    rows = [(*class_row(each, all_us), f"{given_us.pop(each.name, 0.0):.1f}") for each in classes]
    rows += [(name, "0", "0.0", "0%", "0.0", "", f"{took_us:.1f}") for name, took_us in given_us.items()]
    columns = CLASS_COLUMNS if before else CLASS_COLUMNS[:-1]
    return [CLASSES, table(*columns, rows=[row[: len(columns)] for row in rows], right=NUMBERS)]


def class_row(each: ClassTime, all_us: float) -> tuple[str, ...]:
    over = factor(each.total_us / each.floor_us) if each.floor_us else ""
    times = f"{each.total_us:.1f}", share(each.total_us, all_us), f"{each.floor_us:.1f}"
    return each.name, str(each.launches), *times, over


def class_rows(classes: Sequence[ClassTime]) -> list[dict[str, Any]]:
    return [each._asdict() for each in classes]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def in_mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"
