"""The techniques: one optimisation a file, each named as its row in the knobs table and found by that name.

Adding an optimisation is a row in `kitsune/knobs.py` and a file here with a `TECHNIQUE`; nothing else is edited.
"""

import importlib
from collections.abc import Mapping

from kitsune.knobs import KNOBS, Choice
from kitsune.techniques.facts import facts_of, observed_facts
from kitsune.techniques.technique import Build, Facts, Technique, Tolerance

TECHNIQUES: Mapping[str, Technique] = {
    name: importlib.import_module(f"kitsune.techniques.{name}").TECHNIQUE for name in KNOBS
}

__all__ = ["TECHNIQUES", "Build", "Facts", "facts_of", "inapplicable", "observed_facts", "tolerance", "why_not"]


def why_not(knob: str, choice: Choice, facts: Facts) -> str | None:
    """The reason why a choice cannot work here, or None. The default of a knob always works."""
    if choice == KNOBS[knob].default:
        return None
    if facts.distributed:
        return "distributed modules are not supported"
    return TECHNIQUES[knob].why_not(choice, facts)


def inapplicable(facts: Facts) -> dict[str, str]:
    """ "knob=choice" -> reason, for every choice that a search would try and that cannot work here.

    Where it cannot work beside one choice of another knob only, the name is "knob=choice, other=choice".
    """
    reasons = {}
    for name, knob in KNOBS.items():
        for choice in filter(knob.is_searched, knob.choices):
            reason = why_not(name, choice, facts)
            if reason is not None:
                reasons[f"{name}={choice}"] = reason
            elif choice != knob.default:
                beside = TECHNIQUES[name].why_not_beside(choice, facts)
                reasons |= {f"{name}={choice}, {other}={by}": why for (other, by), why in beside.items()}
    return reasons


def tolerance(knobs: Mapping[str, Choice]) -> Tolerance:
    """The widest floor that any choice of the plan asks for."""
    floors = [TECHNIQUES[name].tolerance(knobs.get(name, knob.default)) for name, knob in KNOBS.items()]
    found = [floor for floor in floors if floor is not None]
    return Tolerance(
        loss=max(floor.loss for floor in found),
        gradient=max(floor.gradient for floor in found),
        parameter=max(floor.parameter for floor in found),
    )
