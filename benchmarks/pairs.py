"""Suite pairs: what one choice gives near the best of recorded spaces, without a device.

    python -m benchmarks.pairs streams=4 fusion=kitsune attention=cudnn precision=fp16

A pair is two configurations of a space that differ in nothing but the choice, its knob at its default or at another
choice in the other one, the faster of them within 10 % of the best of that space. For each choice and space: the pairs,
those in which the choice was faster, and the median of how much longer the step is without it.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import results_file
from benchmarks.recorded import Recorded
from benchmarks.search import committed
from kitsune.knobs import KNOBS, Choice
from tuner.search.space import Item

NEAR: Final = 0.10


def pairs(recorded: Recorded, item: Item) -> list[float]:
    """The time without the choice over that with it, of each pair."""
    knob, choice = item
    nearly = (1 - NEAR) * recorded.optimum()
    found = []
    for outcome in recorded.outcomes.values():
        if outcome.failure is not None or outcome.knobs.get(knob) != choice:
            continue
        for other in KNOBS[knob].choices:
            knobs = {name: each for name, each in {**outcome.knobs, knob: other}.items() if each != KNOBS[name].default}
            without = recorded.outcomes.get(frozenset(knobs.items()))
            if other == choice or without is None or without.failure is not None:
                continue
            if max(recorded.speedup(outcome.knobs), recorded.speedup(without.knobs)) >= nearly:
                found.append(without.ratio / outcome.ratio)
    return found


def figures(name: str, recorded: Recorded, items: Sequence[Item]) -> Iterator[results_file.Figure]:
    for item in items:
        found = pairs(recorded, item)
        if found:
            case = f"{name}/{item[0]}={item[1]}"
            yield f"{case}:faster", sum(ratio > 1 for ratio in found), "pairs", len(found)
            yield f"{case}:ratio", round(median(found), 4), "ratio", len(found)


def item_of(word: str) -> Item:
    knob, _, written = word.partition("=")
    choices: dict[str, Choice] = {str(choice): choice for choice in KNOBS[knob].choices} if knob in KNOBS else {}
    if written not in choices:
        raise argparse.ArgumentTypeError(f"{word} is no choice; there are {', '.join(choices) or ', '.join(KNOBS)}")
    return knob, choices[written]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="+", type=item_of, metavar="KNOB=CHOICE")
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results/pairs otherwise")
    given = parser.parse_args()
    found = (figure for path in committed() for figure in figures(path.stem, Recorded.load(path), given.items))
    results_file.write_figures(given.out or results_file.free_path("pairs"), "pairs", found)


if __name__ == "__main__":
    main()
