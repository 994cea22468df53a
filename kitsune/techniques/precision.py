"""precision: the dtype of matrix products and convolutions, by autocast or by TF32; fp16 with loss scaling."""

from collections.abc import Iterable, Mapping

import torch

from kitsune.device.tf32 import tf32_products
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, Tolerance, raised_in
from kitsune.update.loss_scaler import LossScaler

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(Technique):
    name = "precision"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        others = facts.parameter_dtypes - {torch.float32}
        if others:
            return f"parameters are already {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in others))}"
        if choice == "fp16" and facts.others_parameters:
            count = facts.others_parameters
            return f"fp16 scales every gradient, and {count} parameters that train are not in this optimizer"
        if choice == "fp16" and facts.sparse_gradients:
            return "sparse gradients cannot be scaled back"
        if choice == "tf32" and facts.device != "cuda":
            return "TF32 is a format of NVIDIA tensor cores"
        if choice in ("tf32", "bf16") and facts.device == "cuda" and facts.compute_capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, facts.compute_capability))}"
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        if choice == "tf32":
            build.step_contexts.append(tf32_products)
            return
        build.computes_in_half = True
        dtype = AUTOCAST[str(choice)]
        kind = build.device.type
        # No cache of casts: a captured segment would read a cached cast that was freed since.
        build.forward_contexts.append(lambda: torch.autocast(kind, dtype=dtype, cache_enabled=False))
        if choice == "fp16":
            build.scaler = LossScaler(build.device, **build.loss_scaling)

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, LossScaler.__module__.replace(".", "/"))

    def tolerance(self, choice: Choice) -> Tolerance:
        return TOLERANCES[str(choice)]


# Tolerances of the numerics gate: a few times the unit roundoff of the format (fp32 2^-24, TF32 and fp16 2^-11,
# bf16 2^-8), times the depth of the sums in a network. The gate also allows three times the error of eager in the same
# dtype.
TOLERANCES = {
    "fp32": Tolerance(loss=1e-5, gradient=1e-3, parameter=1e-2),
    "tf32": Tolerance(loss=1e-3, gradient=1e-2, parameter=5e-2),
    "fp16": Tolerance(loss=1e-3, gradient=1e-2, parameter=5e-2),
    "bf16": Tolerance(loss=1e-2, gradient=5e-2, parameter=1e-1),
}


def precision_of(knobs: Mapping[str, Choice], parameters: Iterable[torch.Tensor]) -> str:
    """The precision that a step computes in: the half format of most of its parameters, else that of the plan."""
    dtypes = [parameter.dtype for parameter in parameters]
    halves = (name for name, dtype in AUTOCAST.items() if 2 * dtypes.count(dtype) > len(dtypes))
    return next(halves, str(knobs.get(Precision.name, "fp32")))


TECHNIQUE = Precision()
