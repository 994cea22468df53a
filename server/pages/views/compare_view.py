"""The view of the page that compares runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.base.byte_sizes import size_words
from kitsune.knobs import KNOBS
from kitsune.plan import Evidence, Plan, Row, differences
from server.api.compare import Side, warnings
from server.charts.drawing import words
from server.pages.views.facts_view import budget_words
from tuner.records import Run
from tuner.store.queries.runs import label_of
from tuner.terminal.views import in_a_word, standing

FEWEST: Final = 2
_NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class CompareRow:
    """One property, with its value in each run."""

    name: str
    values: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return len(set(self.values)) == 1


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The differences between the plan of a run and that of the first run with one."""

    run: Run
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class CompareView:
    """The page of a comparison, with the warnings of the API. `hidden`: number of rows that do not differ."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]
    rows: tuple[CompareRow, ...]
    hidden: int
    diffs: tuple[PlanDiff, ...]


def compare_view(pairs: Sequence[Side], *, shows_all: bool) -> CompareView:
    rows = [
        CompareRow(name, tuple(describe(run, plan) or _NOTHING for run, plan in pairs))
        for name, describe in _ROWS.items()
    ]
    shown = [row for row in rows if not row.is_same]
    told = [row for row in rows if set(row.values) != {_NOTHING}]
    return CompareView(
        names=tuple(label_of(run) for run, _ in pairs),
        warnings=tuple(warnings(pairs)),
        rows=tuple(told if shows_all else shown),
        hidden=len(told) - len(shown),
        diffs=tuple(_diffs(pairs)),
    )


def _diffs(pairs: Sequence[Side]) -> list[PlanDiff]:
    planned = [(run, plan) for run, plan in pairs if plan is not None]
    if len(planned) < FEWEST:
        return []
    (_, first), *others = planned
    return [PlanDiff(run, tuple(differences(first, plan))) for run, plan in others]


def _of_evidence(describe: Callable[[Evidence], str]) -> Callable[[Run, Plan | None], str]:
    return lambda _, plan: describe(plan.evidence) if plan is not None and plan.evidence is not None else ""


def _of_machine(name: str) -> Callable[[Run, Plan | None], str]:
    return lambda run, _: str(getattr(run.environment, name)) if run.environment is not None else ""


def _of_knob(name: str) -> Callable[[Run, Plan | None], str]:
    return lambda _, plan: str(plan.choice(name)) if plan is not None else ""


_ROWS: Final[Mapping[str, Callable[[Run, Plan | None], str]]] = {
    "name": lambda run, _: run.name,
    "workload": lambda run, _: run.workload,
    "state": lambda run, _: standing(run),
    "error": lambda run, _: run.error or "",
    "verdict": lambda run, _: in_a_word(run.verdict) if run.verdict else "",
    "gain": _of_evidence(lambda found: words.gain(found.speedup)),
    "95 % interval": _of_evidence(lambda found: words.spread(found.speedup)),
    "gain over the step as given": _of_evidence(lambda found: words.gain(found.speedup_over_eager)),
    "step by the plan": _of_evidence(lambda found: words.ms(found.step_ms)),
    "step as given": _of_evidence(lambda found: words.ms(found.eager_step_ms)),
    "best stock configuration": _of_evidence(lambda found: found.baseline),
    "step by that": _of_evidence(lambda found: words.ms(found.baseline_step_ms)),
    "peak memory": _of_evidence(lambda found: words.mebibytes(found.peak_bytes) if found.peak_bytes else ""),
    "memory change": lambda run, _: "" if run.memory_ratio is None else words.change(run.memory_ratio),
    "first step": _of_evidence(lambda found: words.lasted(found.first_step_s)),
    "took": lambda run, _: "" if run.took_s is None else words.lasted(run.took_s),
    "trials": lambda run, _: f"{run.trials:,}",
    "budget": lambda run, _: budget_words(run),
    "memory limit": lambda run, _: size_words(run.memory_limit_bytes) if run.memory_limit_bytes else "",
    "seed": lambda run, _: str(run.seed),
    **{name: _of_knob(name) for name in KNOBS},
    "batch": lambda _, plan: plan.batch if plan is not None else "",
    "GPU": _of_machine("gpu"),
    "driver": _of_machine("driver"),
    "CUDA": _of_machine("cuda"),
    "torch": _of_machine("torch"),
    "triton": _of_machine("triton"),
    "Python": _of_machine("python"),
    "Kitsune": _of_machine("kitsune"),
    "fingerprint": lambda run, _: words.short(run.fingerprint),
}
