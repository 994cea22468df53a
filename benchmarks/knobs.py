"""Suite knobs: what each choice of a plan gives; raw ms of every block to a result file.

    python -m benchmarks.knobs --case gpt2_small/8x512 precision=bf16 compile=default update=kitsune capture=step
    python -m benchmarks.knobs --case gpt2_small/8x512 --plan plan.json --without weights fusion --with fusion=products

Arms: `graph`, the strongest that plain torch has; `plan`; `without KNOB` for each knob named, or for all of the plan
that others can do without; `with KNOB=CHOICE`, the plan with another choice; `drop-in`, the plan in a user's own loop.
All are interleaved in one process.
"""

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.pairs import item_of
from benchmarks.training_step import DEVICE, Build, dropin_step, kitsune_step, race, step_of, write
from kitsune import Plan
from kitsune.knobs import Choice, clashes

RIVAL = "graph"


def plans_of(
    knobs: Mapping[str, Choice], without: Iterable[str], others: Iterable[tuple[str, Choice]] = ()
) -> dict[str, Plan]:
    """Arm -> plan. A knob that another choice of the plan needs cannot be left out."""
    left = {f"without {name}": {each: knobs[each] for each in knobs if each != name} for name in without}
    changed = {f"with {name}={choice}": {**knobs, name: choice} for name, choice in others}
    allowed = {arm: chosen for arm, chosen in (left | changed).items() if next(clashes(chosen), None) is None}
    return {arm: Plan.by_hand(**chosen) for arm, chosen in {"plan": dict(knobs), **allowed}.items()}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser for a case, a plan and what is changed in it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="*", type=item_of, metavar="KNOB=CHOICE")
    parser.add_argument("--case", required=True, choices=CASES, metavar="CASE")
    parser.add_argument("--plan", type=Path, help="a plan that kitsune tune has written, instead of choices")
    parser.add_argument("--without", nargs="*", metavar="KNOB", help="the knobs to leave out, each by itself")
    parser.add_argument("--with", nargs="*", dest="others", type=item_of, default=[], metavar="KNOB=CHOICE")
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    return parser


def knobs_of(arguments: argparse.Namespace) -> dict[str, Choice]:
    return dict(Plan.load(arguments.plan).knobs if arguments.plan else arguments.choices)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-drop-in", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    knobs = knobs_of(arguments)
    torch.cuda.set_device(DEVICE)
    plans = plans_of(knobs, knobs if arguments.without is None else arguments.without, arguments.others)
    builds: dict[str, Build] = {RIVAL: partial(step_of, RIVAL, case, plans["plan"])}
    builds |= {arm: partial(kitsune_step, case, plan) for arm, plan in plans.items()}
    if not arguments.no_drop_in:
        builds["drop-in"] = partial(dropin_step, case, plans["plan"])
    write("knobs", case, race(builds, arguments.rounds), "", arguments.out)


if __name__ == "__main__":
    main()
