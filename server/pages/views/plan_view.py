"""The view of the page of a plan: its choices, its evidence, and where it is valid."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kitsune.class_tables import ClassTables
from kitsune.knobs import KNOBS
from kitsune.plan import Environment, Evidence, Plan
from kitsune.timeline import Timeline
from server.charts.drawing import words
from server.pages.views.class_view import ClassView, class_view
from server.pages.views.facts_view import Fact, machine_facts
from server.pages.views.headline_view import Headline, Mood, numbers, of_evidence, times_as_fast
from server.pages.views.timeline_view import TimelineView, timeline_view
from tuner.records import Run
from tuner.statistics.plan_evidence import words as in_words


@dataclass(frozen=True, slots=True)
class KnobRow:
    """One knob: the choice, its effect and what it needs."""

    name: str
    meaning: str
    choice: str
    effect: str
    needs: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class PlanView:
    """The page of a plan."""

    title: str
    headline: Headline
    knobs: tuple[KnobRow, ...]
    evidence: tuple[Fact, ...]
    machine: tuple[Fact, ...]
    holds: tuple[str, ...]
    document: str
    classes: ClassView | None
    timeline: TimelineView | None
    timeline_note: str = ""


def plan_view(
    plan: Plan, run: Run | None = None, timeline: Timeline | None = None, tables: ClassTables | None = None
) -> PlanView:
    """The whole page. `run`: the one that found the plan, if the viewer may see it, with what it recorded."""
    return PlanView(
        title=in_words(plan.knobs) if plan.knobs else "the step as given",
        headline=_headline(plan),
        knobs=tuple(knob_rows(plan)),
        evidence=tuple(evidence_facts(plan.evidence)) if plan.evidence else (),
        machine=machine_facts(plan.environment) if plan.environment else (),
        holds=tuple(_holds(plan)),
        document=json.dumps(plan.to_json(), indent=2, sort_keys=True),
        classes=class_view(run, plan, tables, timeline) if run is not None else None,
        timeline=timeline_view(timeline) if timeline is not None else None,
    )


def knob_rows(plan: Plan) -> Iterator[KnobRow]:
    """The knobs in the order in which they are applied."""
    for knob in KNOBS.values():
        choice = plan.choice(knob.name)
        is_default = choice == knob.default
        effect = knob.choices.get(choice, "")
        yield KnobRow(knob.name, knob.meaning, str(choice), effect, knob.needs, is_default)


def evidence_facts(found: Evidence) -> Iterator[Fact]:
    """The results of the confirmation."""
    yield "step by the plan", words.ms(found.step_ms)
    yield "best stock configuration", f"{words.ms(found.baseline_step_ms)} ({found.baseline})"
    yield "step as given", words.ms(found.eager_step_ms)
    yield "over the best stock configuration", times_as_fast(found.speedup)
    yield "over the step as given", times_as_fast(found.speedup_over_eager)
    if found.peak_bytes or found.baseline_peak_bytes:
        before = words.mebibytes(found.baseline_peak_bytes)
        yield "peak memory", f"{words.mebibytes(found.peak_bytes)}; best stock configuration {before}"
    else:
        yield "peak memory", "not counted on a CPU"
    yield "first step", words.lasted(found.first_step_s)
    yield "blocks", f"{found.blocks} in {words.count(found.processes, 'process', 'processes')}"
    if found.prediction is not None:
        yield "in one more process", f"{times_as_fast(found.prediction)}, 95 % of the time"
    if found.note:
        yield "note", found.note
    yield "numbers", numbers(found)
    yield "SHA-256 of the samples", found.samples_sha256


def _headline(plan: Plan) -> Headline:
    if plan.evidence is None:
        return Headline(Mood.PLAIN, "Written by hand: nothing about it was measured")
    where = f" on {plan.environment.gpu}" if plan.environment else ""
    return of_evidence(f"Training step{where}", plan, plan.evidence)


def _holds(plan: Plan) -> Iterator[str]:
    """The conditions under which the plan is valid."""
    here = plan.environment
    if here is None:
        yield "Anywhere: it names no machine."
        return
    yield f"Applied on {here.gpu}; refused on every other {'GPU' if here.device == 'cuda' else 'machine'}."
    yield f"Its figures hold for {software(here)}. With other versions it is applied, and its figures may be off."
    if plan.batch:
        yield f"Measured with a batch of {plan.batch}. Other sizes may have a better plan."


def software(here: Environment) -> str:
    parts = [f"torch {here.torch}"]
    parts += [f"{name} {value}" for name in ("triton", "cuda", "driver") if (value := getattr(here, name))]
    return ", ".join(parts)
