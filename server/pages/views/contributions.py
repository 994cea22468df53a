"""A cache of ablations: the contribution of each choice of a plan.

Stored trials and plans never change, so run, plan and number of trials are a valid key. Computing an ablation takes
some 40 ms, as much as the rest of the page.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kitsune.plan import Plan
from tuner.planning.ablation import Ablation, ablation_of
from tuner.records import Run, Trial

MOST: Final = 256
Key = tuple[str, str, int]

_known: OrderedDict[Key, Ablation | None] = OrderedDict()
_lock: Final = threading.Lock()


def contributions_of(run: Run, trials: Sequence[Trial], plan: Plan | None) -> Ablation | None:
    """The ablation; None for a plan that changes nothing, and if nothing was measured."""
    if plan is None or not plan.knobs:
        return None
    key = run.id, plan.plan_id, len(trials)
    with _lock:
        if key in _known:
            _known.move_to_end(key)
            return _known[key]
    found = ablation_of(plan.knobs, trials, run.inapplicable)
    with _lock:
        _known[key] = found
        while len(_known) > MOST:
            _known.popitem(last=False)
    return found
