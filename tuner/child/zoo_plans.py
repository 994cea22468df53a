"""Finds the zoo workload that a plan was tuned for, by the plan's fingerprint."""

import re
from collections.abc import Iterator

import torch

from kitsune.errors import WorkloadError
from kitsune.plan import Plan
from kitsune.workload import shapes_of
from tuner.child.inspection import fingerprints_of
from tuner.workloads.loader import ZOO_PREFIX, load_workload
from tuner.zoo import ZOO
from tuner.zoo.recipe import SIZES


def zoo_workload(plan: Plan, device: str) -> str:
    """The spec of the plan's zoo workload. Raises WorkloadError if it is not in the zoo: a plan holds no model."""
    for spec in _of_shapes(plan.batch) if plan.fingerprint else ():
        if is_plan_of(plan, spec, device):
            return spec
    raise WorkloadError("the plan is for no model of the zoo: name its workload, as in kitsune verify PLAN WORKLOAD")


def is_plan_of(plan: Plan, spec: str, device: str) -> bool:
    """Whether the plan was tuned for this workload, or for its model and optimizer."""
    fingerprint, model_fingerprint, _ = fingerprints_of(spec, load_workload(spec, device))
    return plan.is_of(fingerprint) or plan.is_of(model_fingerprint)


def _of_shapes(batch: str) -> Iterator[str]:
    """The specs whose x has these shapes, written as in `Plan.batch`; those that are built fastest come first."""
    sizes = [int(size) for size in re.findall(r"\d+", batch)[:2]]
    for size in reversed(SIZES):
        for name, entry in ZOO.items():
            recipe = entry.recipe(size)
            chosen = dict(zip(recipe.data.limits, sizes, strict=False))
            if any(value > recipe.data.limits[option] or value < 1 for option, value in chosen.items()):
                continue
            with torch.device("meta"):
                x, _ = recipe.resized(chosen).data.draw()
            if shapes_of(x) == batch:
                options = "&".join(f"{option}={value}" for option, value in (("size", size), *chosen.items()))
                yield f"{ZOO_PREFIX}{name}?{options}"
