"""A plan in, the zoo's name of the workload that it was tuned for out: its fingerprint tells."""

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
    """Raises WorkloadError for a plan of any other workload: a plan holds no code and no model."""
    for spec in _of_shapes(plan.batch) if plan.fingerprint else ():
        if is_plan_of(plan, spec, device):
            return spec
    raise WorkloadError("the plan is of no model of the zoo: name its workload, as in kitsune verify PLAN WORKLOAD")


def is_plan_of(plan: Plan, spec: str, device: str) -> bool:
    """Whether it was tuned for this workload, or for its model and optimizer."""
    fingerprint, model_fingerprint, _ = fingerprints_of(spec, load_workload(spec, device))
    return plan.is_of(fingerprint) or plan.is_of(model_fingerprint)


def _of_shapes(batch: str) -> Iterator[str]:
    """Every model whose x may have these shapes, as `Plan.batch` tells them; first those that are quickly built."""
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
