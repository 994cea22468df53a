"""Lists the configurations of the opening that a run had no time for, with their expected times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.knobs import is_compiled
from kitsune.plan import Plan
from tuner.planning.memory_limit import space_of
from tuner.planning.pace import expected_s
from tuner.planning.standings import searched
from tuner.records import Run, Source, Trial
from tuner.search.outcomes import is_late, is_success, items_to_avoid
from tuner.search.presets import OPENING
from tuner.search.proposal import named
from tuner.search.space import Configuration

#: A trial that timed out is expected to take this many times as long.
LONGER: Final = 1.5


@dataclass(frozen=True, slots=True)
class Untried:
    """A configuration of the opening that was not measured; `expected_s` is None where it cannot be estimated."""

    knobs: Configuration
    name: str
    expected_s: float | None


def untried(run: Run, trials: Sequence[Trial], plan: Plan | None = None) -> list[Untried]:
    """The opening's configurations that were not measured.

    Empty if the budget was a number of trials, if a plan of an earlier run replaced the search, and if the user
    interrupted the run of `plan`.
    """
    tried = searched(trials)
    is_ended = plan is not None and plan.was_interrupted
    if is_ended or run.budget_trials is not None or not any(trial.source is Source.BASELINE for trial in tried):
        return []
    space = space_of(run)
    late = {space.key(trial.knobs): trial.took_s for trial in tried if is_late(trial)}
    ended = [trial for trial in tried if not is_late(trial)]
    known = {space.key(trial.knobs) for trial in ended}
    has_compiled = any(is_compiled(trial.knobs) for trial in filter(is_success, tried))
    found = []
    for proposal in named(OPENING, space, items_to_avoid(space, ended)):
        name = space.key(proposal.knobs)
        if name not in known:
            took_s = LONGER * late[name] if name in late else expected_s(proposal.knobs, tried, space)
            is_told = name in late or not is_compiled(proposal.knobs) or has_compiled
            found.append(Untried(proposal.knobs, proposal.name, (took_s or None) if is_told else None))
    return found
