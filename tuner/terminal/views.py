"""Tables and messages about runs and trials for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rich.table import Table

from kitsune.base.byte_sizes import size_words
from kitsune.base.text_format import duration, factor, step_time
from kitsune.cli.output import ITSELF, facts, headline, machine, spread, table
from kitsune.plan import Interval, Plan
from tuner.planning.ablation import Ablation, Contribution
from tuner.planning.time_spent import PARTS, time_spent
from tuner.records import Failure, Run, RunStatus, Source, Trial, Verdict
from tuner.statistics.plan_evidence import words
from tuner.store.queries.runs import ZOO


def trial_table(trials: Iterable[Trial]) -> Table:
    """A row for each trial: its configuration, and what was measured or why it failed."""
    columns = ("#", "from", "configuration", "ms/step", "speedup", "95 %", "verdict")
    rows = ((str(t.number + 1), t.source.value, words(t.knobs), *_outcome(t)) for t in trials)
    return table(*columns, rows=rows, right=frozenset(("#", "ms/step", "speedup", "95 %")))


def _outcome(trial: Trial) -> tuple[str, str, str, str]:
    if trial.failure is not None:
        return "", "", "", _failure(trial.failure)
    assert trial.comparison is not None
    gain = trial.comparison.speedup
    verdict = "noise floor" if trial.source is Source.BASELINE else in_a_word(trial.comparison.verdict)
    return step_time(step_ms(trial)), factor(gain.median), spread(gain), verdict


def in_a_word(verdict: Verdict) -> str:
    """ "too noisy" of `too_noisy`."""
    return verdict.value.replace("_", " ")


def _failure(failure: Failure) -> str:
    return f"{failure.kind.value.replace('_', ' ')}, {failure.phase.value}: {failure.reason}"


def step_ms(trial: Trial) -> float:
    """The median step of the configuration that was tried: the last arm of its measurement."""
    assert trial.measurement is not None
    return median(trial.measurement.arms[-1].step_ms)


LOST = "lost"
LEGEND = (
    "speedup: over the step as given, timed in the same process; of 'confirm': over the best stock configuration, "
    "measured afresh, in all processes up to this one"
)
ABLATION_LEGEND = (
    "saved: a step of the plan without the choice, less one of the plan, timed in the same process; choices work "
    "together, so these do not add up to the whole"
)


def tried_line(trial: Trial, position: int, total: int | None) -> str:
    """One trial on one line, with how long trying it took; `position` counts from 1."""
    of = f" of {total}" if total else ""
    name = f"{position}{of}" if trial.source.is_search else trial.source.value
    ms, gain, interval, verdict = _outcome(trial)
    told = interval if interval == ITSELF else f"{gain} ({interval})"
    result = f"{ms} ms, {told}, {verdict}" if ms else f"failed: {verdict}"
    return f"[{name}] {words(trial.knobs)}: {result}; tried in {trial.took_s:.0f} s"


def run_table(runs: Sequence[Run], plans: Sequence[Plan | None]) -> Table:
    """A row for each run, with a column of names if any run has one."""
    columns = ["run", "created (UTC)", "status", "workload", "device", "verdict", "speedup"]
    rows = [_run_row(run, plan) for run, plan in zip(runs, plans, strict=True)]
    if not any(run.name for run in runs):
        return table(*columns, rows=rows)
    return table(*columns, "name", rows=((*row, run.name) for row, run in zip(rows, runs, strict=True)))


def _run_row(run: Run, plan: Plan | None) -> tuple[str, ...]:
    gain = factor(plan.evidence.speedup.median) if plan and plan.evidence else ""
    device = run.environment.gpu if run.environment else run.device
    verdict = in_a_word(run.verdict) if run.verdict else ""
    return run.id, f"{run.created_at:%Y-%m-%d %H:%M}", standing(run), run.workload, device, verdict, gain


def standing(run: Run, now: datetime | None = None) -> str:
    """The status; a run that is stored as running but whose lease has expired is "lost"."""
    return LOST if is_lost(run, now or datetime.now(UTC)) else run.status.value


def is_lost(run: Run, now: datetime) -> bool:
    return run.status is RunStatus.RUNNING and run.lease_until is not None and run.lease_until < now


def time_screen(trials: Sequence[Trial]) -> list[Any]:
    """Where the time of a run went, for `Console.print`; empty if unknown."""
    spent = time_spent(trials)
    if spent is None:
        return []
    rows = [(PARTS[part], duration(s), f"{s / spent.total_s:.0%}") for part, s in spent.parts_s.items()]
    rows.append(("all together", duration(spent.total_s), ""))
    columns = ("part of a trial", "time", "share")
    return [
        "",
        "Where the time of this run went:",
        table(*columns, rows=rows, right=frozenset(columns[1:])),
        spent.sentence,
    ]


def untried_screen(found: Sequence[tuple[str, float | None]]) -> list[Any]:
    """Configurations that there was no time for, with their expected seconds if known."""
    if not found:
        return []
    rows = [(name, "not known" if took_s is None else duration(took_s)) for name, took_s in found]
    total_s = sum(took_s or 0.0 for _, took_s in found)
    more = f" They take about {duration(total_s)}, and confirming the best comes on top." if total_s else ""
    return [
        "",
        f"Not measured for want of time.{more}",
        table("configuration", "about", rows=rows, right=frozenset(("about",))),
    ]


def ablation_screen(found: Ablation | None) -> list[Any]:
    """The contribution of each choice of a plan, for `Console.print`; empty if it was not measured."""
    if found is None:
        return []
    columns = ("choice", "ms saved", "95 %", "share")
    rows = [(_choice(part), *_saved(part.saved_ms, found)) for part in found.contributions]
    rows += [
        ("interaction: what these leave", *_saved(found.interaction_ms, found)),
        ("all together", *_saved(found.gain_ms, found)),
    ]
    both = f"a step takes {step_time(found.eager_ms)} ms as given, {step_time(found.plan_ms)} ms by the plan"
    title = f"What each choice gives ({both}; {found.blocks} blocks):"
    parts: list[Any] = ["", title, table(*columns, rows=rows, right=frozenset(columns[1:])), ABLATION_LEGEND]
    if found.unmeasured:
        parts += ["", "Not measured on their own:", table("choice", "why", rows=found.unmeasured.items())]
    return parts


def _choice(part: Contribution) -> str:
    beside = f", without {' and '.join(part.beside)}" if part.beside else ""
    return f"{part.knob}={part.choice}{beside}"


def _saved(ms: Interval, found: Ablation) -> tuple[str, str, str]:
    share = f"{ms.median / found.gain_ms.median:.0%}" if found.gain_ms.median > 0 else ""
    return signed(ms.median), f"{signed(ms.low)} to {signed(ms.high)}", share


def signed(ms: float) -> str:
    return f"{'-' if ms < 0 else '+'}{step_time(abs(ms))}"


def run_screen(run: Run, trials: Sequence[Trial], plan: Plan | None, ablation: Ablation | None = None) -> list[Any]:
    """Everything about a run, for `Console.print`."""
    parts: list[Any] = [facts(_run_facts(run)), ""]
    parts += [trial_table(trials), LEGEND] if trials else ["Nothing was tried yet."]
    if run.inapplicable:
        rows = sorted(run.inapplicable.items())
        parts += ["", "Never tried, as it does not apply here:", table("choice", "why", rows=rows)]
    parts += ablation_screen(ablation)
    parts += time_screen(trials)
    return [*parts, "", headline(plan) if plan else run.error or f"No plan: the run is {_how_it_stands(run)}."]


def _how_it_stands(run: Run) -> str:
    if standing(run) != LOST:
        return run.status.value
    can_move = run.archive is not None or run.workload.startswith(ZOO)
    what_next = "the next worker goes on with it" if can_move else "start it again"
    return f"lost, as its worker has been silent beyond {run.lease_until:%Y-%m-%d %H:%M:%S} UTC; {what_next}"


def _run_facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "run", run.id
    if run.name:
        yield "name", run.name
    yield "workload", run.workload
    yield "status", standing(run) + (f" ({run.worker}, attempt {run.attempt})" if run.worker else "")
    yield "device", machine(run.environment) if run.environment else run.device
    budget = [f"{run.budget_trials} trials" if run.budget_trials else "", f"{run.budget_s:g} s" if run.budget_s else ""]
    yield "budget", " or ".join(filter(None, budget)) or "picked by a first look at the model"
    if run.memory_limit_bytes:
        yield "memory limit", size_words(run.memory_limit_bytes)
    yield "seed", str(run.seed)
    for name in ("created_at", "started_at", "finished_at"):
        if (moment := getattr(run, name)) is not None:
            yield name.removesuffix("_at"), f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    if run.fingerprint:
        yield "fingerprint", run.fingerprint
    if run.plan_id:
        yield "plan", run.plan_id
