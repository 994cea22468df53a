"""precision: the dtype of matrix products and convolutions, by autocast or by TF32; fp16 with loss scaling."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from kitsune.engine.scaler import LossScaler
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, Tolerance, raised_in

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
        dtype = AUTOCAST[str(choice)]
        build.cache_tag += f" precision={choice}"  # torch before 2.12 keys its cache by "some autocast" only
        kind = build.device.type
        # No cache of casts: a cast that lives outside of a captured segment would be read after it is gone.
        build.forward_contexts.append(lambda: torch.autocast(kind, dtype=dtype, cache_enabled=False))
        if choice == "fp16":
            build.scaler = LossScaler(build.device, **build.loss_scaling)

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, LossScaler.__module__.replace(".", "/"))

    def tolerance(self, choice: Choice) -> Tolerance:
        return TOLERANCES[str(choice)]


# Floors of the numerics gate, a few times the unit roundoff of the format (fp32 2^-24, TF32 and fp16 2^-11, bf16 2^-8)
# times the depth of the sums in a network; the gate also allows three times what eager itself loses in the same dtype.
TOLERANCES = {
    "fp32": Tolerance(loss=1e-5, gradient=1e-3, parameter=1e-2),
    "tf32": Tolerance(loss=1e-3, gradient=1e-2, parameter=5e-2),
    "fp16": Tolerance(loss=1e-3, gradient=1e-2, parameter=5e-2),
    "bf16": Tolerance(loss=1e-2, gradient=5e-2, parameter=1e-1),
}


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """TF32 for matrix products and convolutions in the block, the user's flags afterwards."""
    before = _precisions()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        _put_precisions(before)


def _precisions() -> tuple[str | None, bool | None, list[str]]:
    """Both spellings of torch's flags, old and new; an old one is None where the user set the new one only."""
    try:
        matmul: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = None
    try:
        cudnn: bool | None = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn = None
    return matmul, cudnn, [place.fp32_precision for place in _places()]


def _put_precisions(before: tuple[str | None, bool | None, list[str]]) -> None:
    """The old flags first: setting one of them sets the new ones of its places as well."""
    matmul, cudnn, precisions = before
    torch.set_float32_matmul_precision(matmul or "highest")
    torch.backends.cudnn.allow_tf32 = cudnn is not False
    for place, precision in zip(_places(), precisions, strict=True):
        place.fp32_precision = precision


def _places() -> list[Any]:
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn]


TECHNIQUE = Precision()
