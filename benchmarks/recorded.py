"""Recorded spaces: what each of some dozens of configurations of a workload took on a device, as a file of lines.

The first line is the environment with the workload, the choices that do not apply, and the rival: the configuration
that was timed beside each of the others in the same process, so that processes can be compared. Then one line a
configuration: its knobs with ms of every block, its and the rival's, seconds to the first step, the peak of memory and
the seconds of the whole child; or with the failure. Each later piece begins with a line of its environment.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kitsune.knobs import KNOBS, Choice
from tuner.records import Arm, Failure, Measurement
from tuner.search.presets import LATER, ONE_GRAPH, OPENING, SLOW, STOCK, Preset, resolved, stock_variants
from tuner.search.space import Configuration, Item, Space

Key = frozenset[Item]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A configuration and what came of it: `ratios` are its time over the rival's, block by block, or empty."""

    knobs: Mapping[str, Choice]
    ratios: tuple[float, ...]
    failure: Failure | None = None

    @property
    def ratio(self) -> float:
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A space and the configurations of it that were measured; the step as given is one of them."""

    workload: str
    space: Space
    outcomes: Mapping[Key, Outcome]

    @classmethod
    def load(cls, path: Path) -> "Recorded":
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        outcomes: dict[Key, Outcome] = {}
        for found in (outcome_of(line) for line in lines if line["kind"] == "configuration"):
            key = frozenset(found.knobs.items())
            if found.failure is None or key not in outcomes:  # two processes may have recorded the same
                outcomes[key] = found
        space = Space.of({**dict(not_recorded(outcomes.values())), **head["inapplicable"]})
        return cls(head["workload"], space, outcomes)

    def speedup(self, knobs: Configuration) -> float:
        """Over the step as given."""
        return self.outcomes[frozenset()].ratio / self.outcomes[frozenset(knobs.items())].ratio

    def optimum(self) -> float:
        return max(self.speedup(found.knobs) for found in self.outcomes.values() if found.failure is None)


def not_recorded(outcomes: Iterable[Outcome]) -> Iterator[tuple[str, str]]:
    """(choice, reason) of the choices that no configuration has: there were none of them at that time."""
    recorded = {item for found in outcomes for item in found.knobs.items()}
    for name, knob in KNOBS.items():
        for choice in knob.choices:
            if choice != knob.default and (name, choice) not in recorded:
                yield f"{name}={choice}", "not recorded"


def outcome_of(line: Mapping[str, Any]) -> Outcome:
    if line.get("failure") is not None:
        return Outcome(line["knobs"], (), Failure.model_validate(line["failure"]))
    pairs = zip(line["step_ms"], line["rival_ms"], strict=True)
    return Outcome(line["knobs"], tuple(own / rival for own, rival in pairs))


def line_of(knobs: Configuration, outcome: Measurement | Failure, took_s: float) -> dict[str, Any]:
    told = {"kind": "configuration", "knobs": dict(knobs), "took_s": round(took_s, 2)}
    if isinstance(outcome, Failure):
        return {**told, "failure": outcome.model_dump(mode="json")}
    rival, own = outcome.arms[0], outcome.arms[-1]
    return {
        **told,
        "step_ms": rounded(own),
        "rival_ms": rounded(rival),
        "compile_s": round(own.first_step_s, 2),
        "peak_bytes": own.peak_bytes,
        "declined": dict(own.declined),
    }


def rounded(arm: Arm) -> list[float]:
    return [float(f"{each:.5g}") for each in arm.step_ms]


def rival_of(space: Space) -> dict[str, Choice]:
    """One graph, or the strongest that plain torch offers; the step as given where nothing compiles.

    On one stream, where the plan is always the same: its time differs between processes by 0.1 %, that of a step which
    the host launches by 10 % (BERT-base on an H200: 4.700 to 4.707 ms, and 6.8 to 7.9 ms).
    """
    return first_of((ONE_GRAPH, *STOCK), space)


def first_of(presets: Sequence[Preset], space: Space) -> dict[str, Choice]:
    """The first preset that applies; the step as given where none does."""
    return next((dict(found.knobs) for found in resolved(presets, space)), {})


def to_record(space: Space, count: int, seed: int) -> list[dict[str, Choice]]:
    """`count` configurations, or all there are: the step as given, presets, their neighbours, and then random ones.

    At most half are neighbours, of the first presets in turn. What takes minutes to compile is recorded as a preset
    only, unless nothing else is left.
    """
    presets = [dict(found.knobs) for found in resolved((*OPENING, *LATER, *SLOW), space)]
    wanted = [{}, *presets, *map(dict, stock_variants(space, first_of(STOCK, space)))]
    near = list(in_turn([[knobs for _, knobs in space.neighbours(preset)] for preset in presets[:4]]))
    others = list(space.configurations())
    random.Random(seed).shuffle(others)
    quick = [knobs for knobs in near if not space.is_slow(knobs)][: count // 2]
    quick += [knobs for knobs in others if not space.is_slow(knobs)]
    found: dict[Key, dict[str, Choice]] = {}
    for knobs in (*wanted, *quick, *others):
        found.setdefault(frozenset(knobs.items()), knobs)
    return list(found.values())[:count]


def in_turn(lists: Sequence[Sequence[dict[str, Choice]]]) -> Iterator[dict[str, Choice]]:
    """The first of each, then the second of each."""
    for place in range(max(map(len, lists), default=0)):
        yield from (each[place] for each in lists if place < len(each))
