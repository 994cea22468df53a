"""`kitsune verify`: trains with and without a plan from several seeds, and compares the held-out losses."""

from pathlib import Path
from typing import Final

from kitsune.base.atomic_write import write_whole, writing
from kitsune.base.text_format import clean
from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.device.backend import environment, make_current, pick_device
from kitsune.errors import UnfitError, WorkloadError
from kitsune.plan import Match, Plan
from tuner.child.trainings import Trainings
from tuner.child.zoo_plans import is_plan_of, zoo_workload
from tuner.commands.runs import check_writable
from tuner.statistics.loss_curves import Curve, Learned, Verification, judge
from tuner.workloads.loader import located

SUFFIX: Final = ".verified.json"
CODES: Final = {
    Learned.SAME: ExitCode.OK,
    Learned.DIFFERS: ExitCode.REJECTED,
    Learned.UNCLEAR: ExitCode.NO_RESULT,
}


def verify(
    file: Path, spec: str | None, *, steps: int, seeds: int, device: str | None, out: Path | None, as_json: bool
) -> int:
    """Trains, saves the curves, prints the result and returns the exit code.

    Raises PlanError, UnfitError for a plan of another machine, WorkloadError for a workload of another step or with
    only one batch, DeclinedError for a choice that cannot be applied, and SettingsError.
    """
    out = (out or file.with_name(file.stem + SUFFIX)).absolute()  # the user's code may change the working directory
    check_writable(out)
    plan = Plan.load(file)
    with output.aside():
        found = verified(plan, spec, steps=steps, seeds=seeds, device=device)
    with writing(f"--out {out}"):
        write_whole(out, (found.model_dump_json(indent=1) + "\n").encode())
    output.note(f"The curves are in {out}")
    if as_json:
        output.emit(found.model_dump(mode="json"))
    else:
        _show(found)
    return CODES[found.outcome.verdict]


def verified(plan: Plan, spec: str | None, *, steps: int, seeds: int, device: str | None) -> Verification:
    """The comparison of trainings. `spec` may be None for a plan of a zoo workload. Raises like `verify`."""
    place = pick_device(device)
    make_current(place)
    here = environment(place)
    if plan.environment is not None:
        match, reason = plan.environment.match(here)
        if match is Match.REFUSED:
            raise UnfitError(f"the plan was {reason}: verify it there")
    if spec is None:
        spec = zoo_workload(plan, str(place))
    elif plan.fingerprint and not is_plan_of(plan, located(spec), str(place)):
        raise WorkloadError(f"the plan was tuned for another step than that of {spec}")
    trainings = Trainings(plan, located(spec), str(place), steps)
    curves = [trainings.curve(seed, arm) for seed in range(seeds) for arm in ("plain", "plan")]
    return Verification(
        plan_id=plan.plan_id,
        workload=spec,
        environment=here,
        steps=steps,
        seeds=seeds,
        held_out_batches=len(trainings.held_out.batches),
        outcome=judge(curves),
        curves=tuple(curves),
        notes=tuple(trainings.held_out.notes),
    )


def _show(found: Verification) -> None:
    console = output.stdout()
    by_arm = {(curve.seed, curve.arm): curve for curve in found.curves}
    rows = []
    for seed in range(found.seeds):
        plain, plan = by_arm[seed, "plain"], by_arm[seed, "plan"]
        rows.append((str(seed), f"{plain.start:.4g}", *(_final(curve) for curve in (plain, plan))))
    columns = ("seed", "before", "as given", "by the plan")
    console.print(output.table(*columns, rows=rows, right=frozenset(columns)))
    console.print()
    console.print(clean(f"{found.outcome.verdict.value}: {found.outcome.reason}."), soft_wrap=True)
    for note in found.notes:
        console.print(clean(note), soft_wrap=True)


def _final(curve: Curve) -> str:
    return "not finite" if curve.ended else f"{curve.final:.4g}"
