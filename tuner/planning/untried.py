"""A run and its trials in; what is tried first and there was no time for, with what it may take, out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.plan import Plan
from tuner.planning.pace import expected_s
from tuner.planning.standings import searched
from tuner.records import Run, Source, Trial
from tuner.search.outcomes import is_late, is_success, shunned
from tuner.search.presets import OPENING
from tuner.search.proposal import named
from tuner.search.space import Configuration, Space

#: What ran out of time is expected to take so many times as long as it was given.
LONGER: Final = 1.5


@dataclass(frozen=True, slots=True)
class Untried:
    """A configuration of the opening that was not measured; seconds, None where no trial tells."""

    knobs: Configuration
    name: str
    expected_s: float | None


def untried(run: Run, trials: Sequence[Trial], plan: Plan | None = None) -> list[Untried]:
    """Nothing where trials were counted and not time, where an earlier run's plan took the place of a search, and where
    the user ended the one of `plan`."""
    tried = searched(trials)
    is_ended = plan is not None and plan.was_interrupted
    if is_ended or run.budget_trials is not None or not any(trial.source is Source.BASELINE for trial in tried):
        return []
    space = Space.of(run.inapplicable)
    late = {space.key(trial.knobs): trial.took_s for trial in tried if is_late(trial)}
    ended = [trial for trial in tried if not is_late(trial)]
    known = {space.key(trial.knobs) for trial in ended}
    has_compiled = any("compile" in trial.knobs for trial in filter(is_success, tried))
    found = []
    for proposal in named(OPENING, space, shunned(space, ended)):
        name = space.key(proposal.knobs)
        if name not in known:
            took_s = LONGER * late[name] if name in late else expected_s(proposal.knobs, tried, space)
            is_told = name in late or "compile" not in proposal.knobs or has_compiled
            found.append(Untried(proposal.knobs, proposal.name, (took_s or None) if is_told else None))
    return found
