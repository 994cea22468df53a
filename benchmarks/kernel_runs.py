"""What suite kernels runs: an operation forward and backward, an optimizer's update, or casts, once for each arm.

All arms of a case are on the same inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from kitsune.kernels.adamw import adamw_
from kitsune.kernels.casts import cast_all

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

Sizes = Sequence[Any]
Run = Callable[[], Any]
Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Place(NamedTuple):
    """In which dtype and where to measure."""

    dtype: torch.dtype
    device: torch.device

    def draw(self, *sizes: int) -> torch.Tensor:
        """An input of which the gradient is asked for."""
        return torch.randn(sizes, dtype=self.dtype, device=self.device).requires_grad_()


@dataclass(frozen=True, slots=True)
class Operation:
    """What users write in torch, and our kernel of it, on the same inputs."""

    eager: Function
    kitsune: Function
    inputs: tuple[torch.Tensor, ...]

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        """A run gives (outputs, gradients). fullgraph: Inductor compiles all of it, or the arm fails and says so."""
        with torch.no_grad():
            gradients = [
                torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in listed(self.eager, self.inputs)
            ]
        functions: Mapping[str, Callable[[], Function]] = {
            "eager": lambda: self.eager,
            "inductor": lambda: torch.compile(self.eager, dynamic=False, fullgraph=True),
            "kitsune": lambda: self.kitsune,
        }
        return {arm: partial(self.run_of, function, gradients) for arm, function in functions.items()}

    def run_of(self, function: Callable[[], Function], gradients: list[torch.Tensor]) -> Run:
        made, leaves = function(), [tensor for tensor in self.inputs if tensor.requires_grad]

        def run() -> Any:
            outputs = listed(made, self.inputs)
            return outputs, torch.autograd.grad(outputs, leaves, gradients)

        return run


def listed(function: Function, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    outputs = function(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True, slots=True)
class Update:
    """One step of AdamW over parameters of these sizes; each arm has its own. A run gives the parameters."""

    sizes: Sizes
    place: Place

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        return {"eager": self.fused, "inductor": self.compiled, "kitsune": self.ours}

    def parameters(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        drawn = [self.place.draw(*size) for size in self.sizes]
        for parameter in drawn:
            parameter.grad = torch.randn_like(parameter)
        return drawn

    def of_torch(self, parameters: list[torch.Tensor], **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **ADAMW, **implementation, capturable=self.place.device.type == "cuda")

    def fused(self) -> Run:
        parameters = self.parameters()
        optimizer = self.of_torch(parameters, fused=True)

        def run() -> Any:
            optimizer.step()
            return parameters

        return run

    def compiled(self) -> Run:
        parameters = self.parameters()
        optimizer = self.of_torch(parameters, foreach=True)
        optimizer.step()  # makes the states: compiled without them, the step would be compiled twice

        @torch.compile(dynamic=False)
        def step() -> None:
            optimizer.step()

        def run() -> Any:
            step()
            return parameters

        return run

    def ours(self) -> Run:
        parameters = self.parameters()
        gradients = [parameter.grad for parameter in parameters]
        states = [[torch.zeros_like(each) for each in parameters] for _ in range(2)]
        factors = (ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
        # A step for each parameter, as torch keeps them and as a plan has them updated.
        steps = [torch.zeros((), device=self.place.device) for _ in parameters]

        def run() -> Any:
            torch._foreach_add_(steps, 1)
            adamw_(parameters, gradients, *states, steps, *factors)
            return parameters

        return run


@dataclass(frozen=True, slots=True)
class Casts:
    """Tensors of these sizes from fp32 to the place's dtype, or `back`; each arm has its own. A run gives the casts."""

    sizes: Sizes
    place: Place
    back: bool

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        functions: Mapping[str, Callable[..., Any]] = {
            "eager": torch._foreach_copy_,
            "inductor": torch.compile(copied, dynamic=False, fullgraph=True),
            "kitsune": cast_all,
        }
        return {arm: partial(self.run_of, function) for arm, function in functions.items()}

    def run_of(self, function: Callable[..., Any]) -> Run:
        torch.manual_seed(0)
        wide = [torch.randn(size, device=self.place.device) for size in self.sizes]
        narrow = [one.to(self.place.dtype) for one in wide]
        targets, sources = (wide, narrow) if self.back else (narrow, wide)

        def run() -> Any:
            function(targets, sources)
            return targets

        return run


def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)
