"""Progress of a tuning run on stderr: one live line on a terminal, plain lines elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kitsune.base.text_format import clean, duration, factor, step_time
from kitsune.cli.output import stderr
from tuner.measuring.protocol import Inspection
from tuner.records import Run, Source, Trial
from tuner.search.outcomes import best, speedup
from tuner.search.ranking import rankable
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.terminal.views import tried_line
from tuner.tuning.events import (
    Ablating,
    Budgeted,
    Confirming,
    Crowded,
    Event,
    Explaining,
    Inspected,
    PlayingOff,
    Recalled,
    Started,
    Tried,
    Trying,
)

log = logging.getLogger("kitsune.worker")

#: Estimated time of a confirmation, in trials: five processes, prepared while another one is timed.
CONFIRMATION: Final = 3.0


@dataclass(slots=True)
class Standing:
    """The progress of a run; `finish_at` is the estimated end in seconds of `clock`, None if it is unknown."""

    clock: Callable[[], float] = time.monotonic
    run: Run | None = None
    trials: list[Trial] = field(default_factory=list)
    doing: str = "starting"
    is_confirming: bool = False
    confirmed: int = 0
    has_plan: bool = False
    began_at: float = 0.0
    finish_at: float | None = None

    def update(self, event: Event) -> None:
        if isinstance(event, Started):
            self.run, self.began_at, self.doing = event.run, self.clock(), "running the step as given"
        elif isinstance(event, Budgeted) and self.run is not None:
            self.run = self.run.evolve(budget_s=event.budget_s)
        elif isinstance(event, Trying):
            total = f" of {event.total}" if event.total else ""
            self.doing = f"trial {event.number + 1}{total}: {words(event.proposal.knobs)}"
        elif isinstance(event, Tried):
            self.trials.append(event.trial)
            self.confirmed += event.trial.source is Source.CONFIRM
        elif isinstance(event, PlayingOff):
            self.doing = f"measuring the best {len(event.contenders)} against each other"
        elif isinstance(event, Confirming):
            self.is_confirming, self.confirmed = True, 0
            self.doing = f"measuring the best afresh: {words(event.knobs)}"
        elif isinstance(event, Explaining):
            self.is_confirming, self.has_plan = False, True
            self.doing = f"recording where the time of a step goes: {words(event.knobs)}"
        elif isinstance(event, Ablating):
            self.is_confirming, self.has_plan = False, True
            self.doing = f"measuring what each choice gives: the plan without {' and without '.join(event.left_out)}"
        self.finish_at = self._estimate()

    @property
    def searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.source.is_search]

    @property
    def best(self) -> str:
        """The best configuration so far and its speedup over the step as given, as text."""
        leader = best(rankable(self.trials))
        return "" if leader is None else f"best {factor(speedup(leader))} ({words(leader.knobs)})"

    @property
    def share(self) -> float:
        """The spent fraction of the budget, from 0 to 1."""
        if self.run is None:
            return 0.0
        spent = [0.0]
        if self.run.budget_s is not None:
            spent.append((self.clock() - self.began_at) / self.run.budget_s)
        if self.run.budget_trials is not None:
            spent.append(len(self.searched) / (self.run.budget_trials + CONFIRMATION))
        return min(1.0, max(spent))

    def left_s(self) -> float | None:
        return None if self.finish_at is None else max(0.0, self.finish_at - self.clock())

    def _estimate(self) -> float | None:
        if self.run is None or self.has_plan:
            return None
        seconds = [trial.took_s for trial in self.searched]
        mean = sum(seconds) / len(seconds) if seconds else None
        ends = [] if self.run.budget_s is None else [self.began_at + self.run.budget_s]
        if mean is not None and self.is_confirming:
            ends = [self.clock() + self._confirmation_left() * mean]
        elif mean is not None and self.run.budget_trials is not None:
            left = max(0, self.run.budget_trials - len(seconds))
            ends.append(self.clock() + (left + CONFIRMATION) * mean)
        return min(ends, default=None)

    def _confirmation_left(self) -> float:
        """The rest of the confirmation, in trials."""
        return CONFIRMATION * max(0.0, 1 - self.confirmed / PROCESSES)


class Quiet:
    """Prints nothing but tracks the progress; base class of the other reporters."""

    def __init__(self) -> None:
        self.standing = Standing()

    def __call__(self, event: Event) -> None:
        self.standing.update(event)

    def say(self, text: str) -> None:
        return None


class Lines(Quiet):
    """Prints a line per event, for logs."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        for line in self.lines(event):
            self.say(line)

    def lines(self, event: Event) -> Iterator[str]:
        yield from opening(event)
        if isinstance(event, Tried):
            total = self.standing.run.budget_trials if self.standing.run else None
            yield tried_line(event.trial, len(self.standing.searched), total)
        elif isinstance(event, (PlayingOff, Confirming, Explaining, Ablating)):
            yield self.standing.doing

    def say(self, text: str) -> None:
        self.console.print(clean(text), soft_wrap=True)


class Logged(Lines):
    """Writes the same lines as log records, for programs."""

    def say(self, text: str) -> None:
        log.info(text)


class Live(Lines):
    """Shows the current trial, the best so far and the time left on one line that is updated in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=3, no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[best]}", markup=False, table_column=Column(ratio=2, no_wrap=True)),
            TimeLeft(self.standing),
            console=console,
            transient=True,
            expand=True,
        )
        self.task = self.progress.add_task(self.standing.doing, total=1.0, best="")

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        standing = self.standing
        self.progress.update(
            self.task, description=clean(standing.doing), completed=standing.share, best=clean(standing.best)
        )

    def lines(self, event: Event) -> Iterator[str]:
        yield from opening(event)


class TimeLeft(ProgressColumn):
    """Elapsed time and time left, counting down between events too."""

    def __init__(self, standing: Standing) -> None:
        super().__init__()
        self.standing = standing

    def render(self, task: Task) -> Text:
        left = self.standing.left_s()
        spent = duration(task.elapsed or 0.0)
        return Text(f"{spent}, {duration(left)} left" if left is not None else spent, style="progress.remaining")


def opening(event: Event) -> Iterator[str]:
    """Lines for events that every reporter prints."""
    if isinstance(event, Started):
        yield f"run {event.run.id}: {event.run.workload} on {event.run.device}"
    elif isinstance(event, Inspected):
        yield _as_given(event.inspection)
        yield from event.inspection.notes
    elif isinstance(event, Budgeted):
        yield event.words
    elif isinstance(event, Crowded):
        yield f"ran out of memory beside other processes, and is to be tried again with fewer: {words(event.knobs)}"
    elif isinstance(event, Recalled):
        yield f"run {event.run_id} has proven a plan for this step here, which is measured again"


def _as_given(found: Inspection) -> str:
    return (
        f"as given: about {step_time(found.step_ms)} ms a step, {found.parameters:,} parameters; "
        f"{sum(',' not in name for name in found.inapplicable)} choices do not apply here"
    )


@contextlib.contextmanager
def telling(*, quiet: bool) -> Iterator[Quiet]:
    """The reporter that fits stderr: live, lines or quiet."""
    console = stderr()
    if quiet:
        yield Quiet()
    elif console.is_terminal and not console.is_dumb_terminal:
        live = Live(console)
        with live.progress:
            yield live
    else:
        yield Lines(console)
