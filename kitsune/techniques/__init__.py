"""The techniques: one optimisation in each file, which has the name of its knob.

To add an optimisation, add a row to `kitsune/knobs.py` and a file with a `TECHNIQUE` here. The tuner searches it, the
runtime applies it and the documentation shows it without another edit; docs/decisions/0002 names what may need one.
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
    """Why a choice cannot work for this workload and device, or None. The default of a knob always works."""
    if choice == KNOBS[knob].default:
        return None
    if facts.distributed:
        return "distributed modules are not supported"
    return TECHNIQUES[knob].why_not(choice, facts)


def inapplicable(facts: Facts) -> dict[str, str]:
    """ "knob=choice" -> reason, for every choice that a search may try and that cannot work here.

    If it only cannot work together with a choice of another knob, the key is "knob=choice, other=choice".
    """
    reasons = {}
    for name, knob in KNOBS.items():
        for choice in knob.choices if knob.saves_memory else filter(knob.is_searched, knob.choices):
            reason = why_not(name, choice, facts)
            if reason is not None:
                reasons[f"{name}={choice}"] = reason
            elif choice != knob.default:
                beside = TECHNIQUES[name].why_not_beside(choice, facts)
                reasons |= {f"{name}={choice}, {other}={by}": why for (other, by), why in beside.items()}
    return reasons


def tolerance(knobs: Mapping[str, Choice]) -> Tolerance:
    """The widest tolerance of any choice of the plan, for each kind of error."""
    floors = [TECHNIQUES[name].tolerance(knobs.get(name, knob.default)) for name, knob in KNOBS.items()]
    found = [floor for floor in floors if floor is not None]
    return Tolerance(
        loss=max(floor.loss for floor in found),
        gradient=max(floor.gradient for floor in found),
        parameter=max(floor.parameter for floor in found),
    )
