"""The gated block of a transformer, down(activation(gate(x)) * up(x)) (Shazeer 2020), without passes of its own.

The forward computes each tile of both products over the same loads of x, and stores three tensors: their gated product,
the activation, and the activation's slope times the other factor. The backward multiplies each tile of the gated
product's gradient by the last two, which gives the gradients of both layers. All other products are torch's own. On
Hopper gated_linear_hopper does the same for large results. Sums go in a fixed order, without atomics, so results are
bitwise reproducible.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from kitsune.kernels.bias_activation import KINDS, activated_with_slope
from kitsune.kernels.launch import IS_INTERPRETED, runs_in_triton
from kitsune.kernels.layouts import Shape
from kitsune.kernels.products import (
    ALIGNED,
    HAS_GLUON,
    HOPPER,
    OFFERED,
    Tiling,
    described,
    halves_of,
    launch,
    place_of,
    takes_turns,
    with_product,
)

if HAS_GLUON:
    from kitsune.kernels import gated_linear_hopper

#: `wide` columns of each product: both accumulators take the registers of one of twice the width, so two programs fit
#: on a multiprocessor. In bf16 with SiLU it compiles for Hopper to 128 registers, without spills, and 112 KiB.
FORWARD: Final = Tiling(high=128, wide=64, deep=64, pieces=1, stages=3, warps=8, programs=2, registers=128)
#: That of a block without a gate, whose product is the same. It compiles to 208 registers, without spills, and 112 KiB.
BACKWARD: Final = Tiling(high=128, wide=128, deep=64, pieces=2, stages=3, warps=4, programs=2)


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, kind: str) -> torch.Tensor:
    """The linear layer `down` (out, hidden) of activation(x `gate`^T) * (x `up`^T), both (hidden, n), for x (..., n).

    `kind` is that of the activation, one of `bias_activation`'s; any other raises ValueError. The layers have no
    biases. Rounded to the dtype are the results of all layers, the gated product, the activation, and
    its slope times the result of `up`.

    Falls back to `reference` where `is_offered` is False.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no activation that is known here; choose one of {', '.join(KINDS)}")
    if not is_offered(x, gate, up, down):
        return reference(x, gate, up, down, kind)
    y: torch.Tensor = GatedMlp.apply(x.reshape(-1, x.shape[-1]), gate, up, down, kind)
    return y.view(*x.shape[:-1], down.shape[0])


def joined_gated_mlp(x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor, kind: str) -> torch.Tensor:
    """`gated_mlp` of one layer `gate_and_up` (2 * hidden, n): its first half of rows is `gate`, its second one `up`.

    The gradient of x is one product, where it is two for two weights.
    """
    gate, up = gate_and_up.chunk(2)
    if kind not in KINDS or not is_offered(x, gate, up, down):
        return gated_mlp(x, gate, up, down, kind)
    y: torch.Tensor = JoinedGatedMlp.apply(x.reshape(-1, x.shape[-1]), gate_and_up, down, kind)
    return y.view(*x.shape[:-1], down.shape[0])


def reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, kind: str) -> torch.Tensor:
    """`gated_mlp` in eager torch: what a model computes without this kernel."""
    return F.linear(KINDS[kind](F.linear(x, gate)) * F.linear(x, up), down)


def is_offered(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the kernels compute it: in half precision, on Hopper or newer, with rows of a multiple of 16 bytes."""
    given = (x, gate, up, down)
    return (
        runs_in_triton(*given)
        and all(tensor.dtype == x.dtype and tensor.device == x.device for tensor in given)
        and x.dtype in OFFERED
        and x.ndim > 0
        and gate.ndim == down.ndim == 2
        and gate.shape == up.shape
        and (x.shape[-1], gate.shape[0]) == (gate.shape[1], down.shape[1])
        and all(n > 0 and n * x.element_size() % ALIGNED == 0 for n in (*gate.shape, down.shape[0]))
        and (IS_INTERPRETED or torch.cuda.get_device_properties(x.device).major >= HOPPER)
    )


class GatedMlp(torch.autograd.Function):
    """One node, since the gradients of the first two products need that of the last one's result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, kind: str
    ) -> torch.Tensor:
        hidden, activation, slopes = forward(x, gate, up, kind)
        ctx.save_for_backward(x, gate, up, down, hidden, activation, slopes)
        return F.linear(hidden, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up, down, hidden, activation, slopes = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down, _ = ctx.needs_input_grad
        dx = dgate = dup = None
        if needs_x or needs_gate or needs_up:
            both = backward(dy, down, activation, slopes)
            dx = product_of_both(both, gate, up) if needs_x else None
            dgate, dup = of_weights(both, x, needs_gate, needs_up)
        return dx, dgate, dup, dy.t() @ hidden if needs_down else None, None


class JoinedGatedMlp(torch.autograd.Function):
    """`GatedMlp` of one weight for gate and up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor, kind: str) -> torch.Tensor:
        hidden, activation, slopes = forward(x, *gate_and_up.chunk(2), kind)
        ctx.save_for_backward(x, gate_and_up, down, hidden, activation, slopes)
        return F.linear(hidden, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_and_up, down, hidden, activation, slopes = ctx.saved_tensors
        needs_x, needs_joined, needs_down, _ = ctx.needs_input_grad
        dx = djoined = None
        if needs_x or needs_joined:
            both = backward(dy, down, activation, slopes)
            dx = both @ gate_and_up if needs_x else None
            djoined = both.t() @ x if needs_joined else None
        return dx, djoined, dy.t() @ hidden if needs_down else None, None


def of_weights(
    both: torch.Tensor, x: torch.Tensor, needs_gate: bool, needs_up: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of both weights (hidden, n): halves of one product where both are needed."""
    if needs_gate and needs_up:
        dgate, dup = (both.t() @ x).chunk(2)
        return dgate, dup
    left, right = both.chunk(2, dim=1)
    return left.t() @ x if needs_gate else None, right.t() @ x if needs_up else None


@torch.library.custom_op("kitsune::gated_linear", mutates_args=())
def forward(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the gated product, the activation, its slopes times the result of `up`), each (rows, hidden), of x (rows, n)."""
    hidden = x.new_empty(len(x), len(gate))
    activation, slopes = torch.empty_like(hidden), torch.empty_like(hidden)
    if takes_turns(hidden, FORWARD) and kind in gated_linear_hopper.FASTER:
        gated_linear_hopper.forward(x, gate, up, (hidden, activation, slopes), kind)
    elif hidden.numel():
        high, wide, deep, pieces, *_ = FORWARD
        launch(
            forward_kernel,
            FORWARD,
            hidden,
            x.shape[1],
            described(x, high, deep),
            described(gate, wide, deep),
            described(up, wide, deep),
            *(described(result, high, wide // pieces) for result in (hidden, activation, slopes)),
            kind,
        )
    return hidden, activation, slopes


@forward.register_fake
def _(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = x.new_empty(x.shape[0], gate.shape[0])
    return hidden, torch.empty_like(hidden), torch.empty_like(hidden)


@torch.library.custom_op("kitsune::gated_linear_backward", mutates_args=())
def backward(dy: torch.Tensor, down: torch.Tensor, activation: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """The gradients of the results of `gate` and of `up` side by side, (rows, 2 * hidden), from `dy` (rows, out).

    `activation` and `slopes` are those that `forward` gave.
    """
    rows, columns = slopes.shape
    both = slopes.new_empty(rows, 2 * columns)
    if takes_turns(slopes, BACKWARD):
        gated_linear_hopper.backward(dy, down, activation, slopes, both)
    elif both.numel():
        high, wide, deep, pieces, *_ = BACKWARD
        piece = [high, wide // pieces]
        launch(
            backward_kernel,
            BACKWARD,
            slopes,
            dy.shape[1],
            described(dy, high, deep),
            described(down, deep, wide),
            described(activation, *piece),
            described(slopes, *piece),
            *(TensorDescriptor.from_tensor(half, piece) for half in both.chunk(2, dim=1)),
        )
    return both


@backward.register_fake
def _(dy: torch.Tensor, down: torch.Tensor, activation: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return slopes.new_empty(slopes.shape[0], 2 * slopes.shape[1])


@torch.library.custom_op("kitsune::gated_linear_input", mutates_args=())
def product_of_both(both: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gradient of x (rows, n), from those of the results of `gate` and of `up` side by side, (rows, 2 * hidden).

    The second product adds to the result of the first in place: Inductor would copy that before it.
    """
    left, right = both.chunk(2, dim=1)
    return (left @ gate).addmm_(right, up)


@product_of_both.register_fake
def _(both: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return both.new_empty(both.shape[0], gate.shape[1])


@register_flop_formula(torch.ops.kitsune.gated_linear)
def _(x: Shape, gate: Shape, *_: Any, **__: Any) -> int:
    return 4 * x[0] * math.prod(gate)


@register_flop_formula(torch.ops.kitsune.gated_linear_backward)
def _(dy: Shape, down: Shape, *_: Any, **__: Any) -> int:
    return 2 * dy[0] * math.prod(down)


@register_flop_formula(torch.ops.kitsune.gated_linear_input)
def _(both: Shape, gate: Shape, *_: Any, **__: Any) -> int:
    return 4 * both[0] * math.prod(gate)


@triton.jit(do_not_specialize=["rows", "programs"])
def forward_kernel(
    x,
    gate,
    up,
    hidden,
    activation,
    slopes,
    KIND: tl.constexpr,
    rows,
    columns,
    inner,
    programs,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PIECES: tl.constexpr,
):
    tl.assume(inner > 0)  # else the code for no products at all is there as well
    first = tl.program_id(0)
    # A second counter for what follows the products: the loads of the next tile begin before this one is stored.
    stored = first - programs
    for tile in tl.range(first, tl.cdiv(rows, HIGH) * tl.cdiv(columns, WIDE), programs, flatten=True):
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        gated = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        linear = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for step in range(tl.cdiv(inner, DEEP)):
            given = x.load([row, step * DEEP])
            gated = with_product(gated, given, gate.load([column, step * DEEP]).T)
            linear = with_product(linear, given, up.load([column, step * DEEP]).T)
        stored += programs
        row, column = place_of(stored, rows, columns, HIGH, WIDE)
        store_results(gated, linear, hidden, activation, slopes, row, column, KIND, WIDE, PIECES)


@triton.jit
def store_results(
    gated,
    linear,
    hidden,
    activation,
    slopes,
    row,
    column,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Stores a tile of each result, from the results of `gate` and of `up`."""
    if PIECES > 1:
        left, right = halves_of(gated)
        other_left, other_right = halves_of(linear)
        store_results(left, other_left, hidden, activation, slopes, row, column, KIND, WIDE // 2, PIECES // 2)
        column += WIDE // 2
        store_results(right, other_right, hidden, activation, slopes, row, column, KIND, WIDE // 2, PIECES // 2)
    else:
        value, slope = activated_with_slope(gated.to(hidden.dtype).to(tl.float32), KIND)
        factor = linear.to(hidden.dtype).to(tl.float32)
        hidden.store([row, column], (value * factor).to(hidden.dtype))
        activation.store([row, column], value.to(hidden.dtype))
        slopes.store([row, column], (slope * factor).to(hidden.dtype))


@triton.jit(do_not_specialize=["rows", "programs"])
def backward_kernel(
    dy,
    down,
    activation,
    slopes,
    dgate,
    dup,
    rows,
    columns,
    inner,
    programs,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PIECES: tl.constexpr,
):
    for tile in range(tl.program_id(0), tl.cdiv(rows, HIGH) * tl.cdiv(columns, WIDE), programs):
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for step in range(tl.cdiv(inner, DEEP)):
            total = with_product(total, dy.load([row, step * DEEP]), down.load([step * DEEP, column]))
        store_gradients(total, activation, slopes, dgate, dup, row, column, WIDE, PIECES)


@triton.jit
def store_gradients(total, activation, slopes, dgate, dup, row, column, WIDE: tl.constexpr, PIECES: tl.constexpr):
    """Stores a tile of `dgate` and of `dup`, from the gradient of the gated product."""
    if PIECES > 1:
        left, right = halves_of(total)
        store_gradients(left, activation, slopes, dgate, dup, row, column, WIDE // 2, PIECES // 2)
        store_gradients(right, activation, slopes, dgate, dup, row, column + WIDE // 2, WIDE // 2, PIECES // 2)
    else:
        dgate.store([row, column], (total * slopes.load([row, column]).to(tl.float32)).to(dgate.dtype))
        dup.store([row, column], (total * activation.load([row, column]).to(tl.float32)).to(dup.dtype))
