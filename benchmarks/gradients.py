"""Suite gradients: how far each gradient of a plan is from the step in float64 or fp32, and which choice is to blame.

    python -m benchmarks.gradients --case nanogpt/12x1024 precision=bf16 compile=default activations=bf16
    python -m benchmarks.gradients --case nanogpt/12x1024 --plan plan.json --without streams fusion activations

The arms are `plan`, `without KNOB` and `with KNOB=CHOICE`, as in suite knobs. Each trains by itself. At some of its
settled steps the reference, and eager in the same formats, take the same step from the same weights. A share is the
part of the reference's gradient that is in the plan's, less 1: it shows what is wrong in every step alike. Shares and
(in brackets) errors that are printed are means.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.knobs import knobs_of, parser_of, plans_of
from kitsune.device.backend import pick_device
from kitsune.knobs import Choice
from tuner.building.arms import LiveArm
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.long_training import RATES
from tuner.numerics.restarts import Yardsticks, reference_of, step_result
from tuner.numerics.tensor_errors import StepErrors, compared
from tuner.numerics.training_trace import batches_of, model_state

SUITE: Final = "gradients"
EVERY: Final = 3  # settled steps from one comparison to the next
SHOWN: Final = 5
#: The arms of a comparison. The last one is there where the plan rounds activations.
NAMES: Final = ("plan", "eager", "eager with parameters in bf16")


def comparisons(job: Job, count: int, *, double: bool) -> tuple[list[str], dict[str, list[StepErrors]]]:
    """The names of the parameters, and `count` comparisons of each of NAMES."""
    arm = LiveArm(job, job.arms[-1])
    reference, _ = reference_of(job, randomness=True, double=double)
    yardsticks = Yardsticks(job, 1, randomness=True)
    batch_at = batches_of(arm.workload.batch, job.seed, vary=True)
    found: dict[str, list[StepErrors]] = {}
    index = settled = 0
    while len(found.get("plan", ())) < count:
        arm.rates.scale(RATES[index % len(RATES)])
        settled += arm.step.is_settled
        state = model_state(arm.workload) if settled and settled % EVERY == 0 else None
        loss = arm(*batch_at(index))
        if state is not None:
            expected = reference.run(state, batch_at(index))
            ours = compared(step_result(arm.workload, loss, state), expected)
            theirs = [compared(each, expected) for each in yardsticks.runs(state, batch_at(index))]
            for name, errors in zip(NAMES, [ours, *theirs], strict=False):
                found.setdefault(name, []).append(errors)
        index += 1
    names = [name for name, _ in arm.workload.model.named_parameters()]
    arm.close()
    yardsticks.close()
    return names, found


def rows_of(names: Sequence[str], found: Mapping[str, Sequence[StepErrors]]) -> list[dict[str, Any]]:
    """One for each parameter, the plan's largest mean share first, with the samples of all comparisons."""
    rows = [
        {
            "parameter": name,
            "shares": {arm: [each.gradients.shares[index] - 1 for each in errors] for arm, errors in found.items()},
            "errors": {arm: [each.gradients.errors[index] for each in errors] for arm, errors in found.items()},
        }
        for index, name in enumerate(names)
    ]
    return sorted(rows, key=lambda row: -abs(fmean(row["shares"]["plan"])))


def measured(
    workload: str, knobs: Mapping[str, Choice], count: int, seed: int, *, double: bool
) -> list[dict[str, Any]]:
    torch.compiler.reset()
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=dict(knobs)))
    job = Job(workload=workload, device=str(pick_device()), arms=arms, seed=seed)
    return rows_of(*comparisons(job, count, double=double))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=6, help="comparisons of each arm")
    parser.add_argument("--double", action="store_true", help="the reference in float64; in fp32 otherwise")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    knobs = knobs_of(arguments)
    spec = CASES[arguments.case].spec
    out = arguments.out or results_file.free_path(SUITE)
    if not out.exists():
        results_file.append(out, results_file.environment_line(results_file.command_line()))
    for arm, plan in plans_of(knobs, arguments.without or (), arguments.others).items():
        rows = measured(spec, plan.knobs, arguments.count, arguments.seed, double=arguments.double)
        print(arm, dict(plan.knobs))
        for row in rows[:SHOWN]:
            told = "; ".join(
                f"{arm} {100 * fmean(shares):+.2f} % ({100 * fmean(row['errors'][arm]):.2f} %)"
                for arm, shares in row["shares"].items()
            )
            print(f"  {row['parameter']:40} {told}")
        line = {"kind": "case", "suite": SUITE, "case": arguments.case, "arm": arm, "knobs": dict(plan.knobs)}
        results_file.append(out, {**line, "seed": arguments.seed, "double": arguments.double, "gradients": rows})


if __name__ == "__main__":
    main()
