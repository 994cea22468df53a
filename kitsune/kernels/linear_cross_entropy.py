"""The last layer of a language model fused with its loss, without storing all logits at once.

The method is that of Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989). The forward processes the rows in chunks: a
matrix product computes a chunk's logits, one kernel replaces them by their gradient in place, and two more products
give the gradient of x and add to that of the weight. The backward only multiplies by the gradient of the loss.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.cross_entropy import is_offered, loss_dtype, losses_of, piece_of, write_gradient
from kitsune.kernels.launch import on_device_of, runs_in_triton, warps_of
from kitsune.kernels.layouts import Shape

#: The most bytes of a chunk's logits: 512 MiB are 5341 rows of GPT-2's 50257 classes in bf16. Few large chunks
#: keep matrix products efficient, and the gradient of the weight is read and written once a chunk. Forward and backward
#: of GPT-2's at 8x512 on an H200 take 2.06 ms with 128 MiB, 1.93 with 256, 1.86 with 512 and 1.85 with 2 GiB; those of
#: Llama 3 1B with 8192 tokens 21.9, 22.2, 21.1 and 20.2 (results/chunks/2026-11-30-h200.jsonl).
LOGITS_BYTES: Final = 2**29
#: The fewest rows of a chunk, whatever their size: 1024 x 768 elements of dx are 48 tiles of 128 x 128, already fewer
#: than one for each multiprocessor of an H200.
LEAST_ROWS: Final = 1024
#: The most chunks, since the gradient of the weight is rounded to its dtype after each. Relative errors in
#: bf16 against fp64, computed on a CPU (16384 rows of 128, 2048 classes as frequent as words are): 1.8e-3 by F.linear
#: and F.cross_entropy; here 2.6e-3 with 4 chunks, 3.6e-3 with 8, 4.9e-3 with 16, 9.9e-3 with 64. A sum in fp32 stays at
#: 1.8e-3, but takes 4 bytes an element besides the result: 2.1 GB for Llama 3 8B (128256 x 4096), where an eighth of
#: the logits of 16384 tokens takes 0.5 GB.
MOST_CHUNKS: Final = 8
#: Classes are padded to a multiple of this. Rows of 50257 logits in half precision start at odd multiples of two bytes,
#: and cuBLAS cannot load 16 bytes at once from them.
CLASSES_MULTIPLE: Final = 64

#: In fp16 the gradients of a mean over thousands of rows would underflow (its smallest number is 6e-8), and the forward
#: does not know the loss scale. So backward divides by the count, and the gradient of the logits is this much larger.
FP16_LIFT: Final = 1024.0
#: Sums over more rows than these are scaled down as if of so many, since no loss scaler can fix an overflow in the
#: forward. An element of the gradient of a mean may then be as large as 255.
FP16_ROWS: Final = 256

#: Elements that a program scales at once: one 16-byte load in half precision for each thread of 8 warps.
SCALED_AT_ONCE: Final = 2048
#: Programs for the scaling: eight for each of an H200's multiprocessors.
SCALERS: Final = 1056
NO_SECOND_DERIVATIVE: Final = b"kitsune::linear_cross_entropy has no second derivative: use torch's own loss here"


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of `x` (rows, hidden) times the transpose of `weight` (classes, hidden) plus `bias` (classes,).

    `target` (rows,) holds class numbers; `reduction` is "mean" or "sum"; all else is as in `cross_entropy`. x, weight
    and bias are of one dtype; under autocast they are cast to its dtype, as F.linear would, and the loss is in fp32.
    Logits are rounded to that dtype, as those of F.linear are, and so is the weight's gradient after each chunk.

    Falls back to `reference` where Triton cannot run, for empty inputs, other shapes and dtypes, reduction "none", and
    for arguments for which torch raises its own error.
    """
    if not is_chunked(x, weight, bias, target, label_smoothing, reduction):
        return reference(x, weight, target, bias, ignore_index, label_smoothing, reduction)
    dtype = loss_dtype(x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    return forward(x, weight, target, bias, ignore_index, label_smoothing, reduction, dtype, *needs)[0]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`linear_cross_entropy` in eager torch, in the dtype of x: what a model computes without this kernel."""
    return F.cross_entropy(
        F.linear(x, weight, bias),
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def is_chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    label_smoothing: float,
    reduction: str,
) -> bool:
    """Whether the kernels support this loss."""
    given = [x, weight] if bias is None else [x, weight, bias]
    is_cast = torch.is_autocast_enabled(x.device.type)
    return (
        runs_in_triton(*given)
        and all(tensor.device == x.device and (is_cast or tensor.dtype == x.dtype) for tensor in given)
        and x.ndim == weight.ndim == 2
        and x.shape[1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and weight.numel() > 0
        and reduction != "none"
        and is_offered(x, target, label_smoothing, reduction)
    )


@torch.library.custom_op("kitsune::linear_cross_entropy", mutates_args=())
def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss in `dtype`, gradients of x, weight and bias, the factor by which backward must multiply them).

    Weight and bias are cast to the dtype of x. A gradient that is not needed is empty. That of the bias is in fp32.
    """
    x, target, classes = x.contiguous(), target.contiguous(), len(weight)
    weight, bias = padded(weight, x.dtype), None if bias is None else padded(bias, x.dtype)
    count = (target != ignore_index).sum().float()
    early, late = factors_of(x.dtype, count if reduction == "mean" else torch.ones_like(count))
    losses = x.new_empty(len(x), dtype=torch.float32)
    dx = torch.empty_like(x) if needs_x else x.new_empty(0)
    dweight = torch.empty_like(weight) if needs_weight else x.new_empty(0)
    dbias = x.new_zeros(len(weight) if needs_bias else 0, dtype=torch.float32)
    lift, shrink = lift_of(x.dtype), shrink_of(x.dtype, len(x))
    size = rows_of_a_chunk(len(x), len(weight) * x.element_size())
    buffer = x.new_empty(size, len(weight))
    for start in range(0, len(x), size):
        part = x[start : start + size]
        logits = buffer[: len(part)]
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        chunk = slice(start, start + len(part))
        needs_any = needs_x or needs_weight or needs_bias
        launch(logits, target[chunk], losses[chunk], early, classes, ignore_index, label_smoothing, needs_any)
        if needs_x:
            dx[chunk].addmm_(logits, weight, beta=0, alpha=1 / lift)
        if needs_weight:
            dweight.addmm_(logits.t(), part, beta=int(start > 0), alpha=1 / (lift * shrink))
        if needs_bias:
            dbias.add_(logits.sum(0, dtype=torch.float32), alpha=1 / (lift * shrink))
    loss = losses.sum() / count if reduction == "mean" else losses.sum()
    return loss.to(dtype), dx, dweight[:classes], dbias[:classes], late


@forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight = (x.new_empty(like.shape if needs else 0) for like, needs in ((x, needs_x), (weight, needs_weight)))
    dbias = x.new_empty(weight.shape[0] if needs_bias else 0, dtype=torch.float32)
    return x.new_empty((), dtype=dtype), dx, dweight, dbias, x.new_empty((), dtype=torch.float32)


@register_flop_formula(torch.ops.kitsune.linear_cross_entropy)
def _(x: Shape, weight: Shape, *given: Any, **_: Any) -> int:
    needs_x, needs_weight = given[6:8]
    return 2 * x[0] * math.prod(weight) * (1 + needs_x + needs_weight)


@torch.library.custom_op("kitsune::scale_by", mutates_args=("gradient",))
def scale(gradient: torch.Tensor, dloss: torch.Tensor, late: torch.Tensor, shrink: float) -> None:
    """Multiplies `gradient` in place by the other arguments. Does nothing if their product is one."""
    share = triton.cdiv(triton.cdiv(gradient.numel(), SCALERS), SCALED_AT_ONCE) * SCALED_AT_ONCE
    with on_device_of(gradient):
        scale_kernel[(triton.cdiv(gradient.numel(), share),)](
            gradient,
            dloss,
            late,
            shrink,
            gradient.numel(),
            share,
            SCALED_AT_ONCE,
            num_warps=warps_of(SCALED_AT_ONCE),
        )


@scale.register_fake
def _(gradient: torch.Tensor, dloss: torch.Tensor, late: torch.Tensor, shrink: float) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, bias, *_ = inputs
    ctx.dtypes = tuple(None if each is None else each.dtype for each in (x, weight, bias))
    ctx.shrink = shrink_of(x.dtype, x.shape[0])
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dloss: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Scales the saved gradients in place, or copies of them if they are kept for another backward."""
    *gradients, late = ctx.saved_tensors
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    scaled = [gradient.clone() if is_kept else gradient for gradient in gradients]
    for gradient, shrink in zip(scaled, (1.0, ctx.shrink, ctx.shrink), strict=True):
        if gradient.numel():
            scale(gradient, dloss, late, shrink)
    rounded = (
        gradient.to(dtype) if gradient.numel() else None for gradient, dtype in zip(scaled, ctx.dtypes, strict=True)
    )
    if torch.is_grad_enabled():  # create_graph
        rounded = (None if gradient is None else differentiated_once(gradient) for gradient in rounded)
    dx, dweight, dbias = rounded
    return dx, dweight, None, dbias, *[None] * 7


def differentiated_once(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, with an error on differentiating it again: it was computed in the forward, without a graph."""
    return torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE, 1)(gradient.detach().requires_grad_())


forward.register_autograd(_gradients, setup_context=_keep)


def padded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype, padded with zeros to a multiple of CLASSES_MULTIPLE classes: cast in the same pass."""
    classes = len(tensor)
    whole = triton.cdiv(classes, CLASSES_MULTIPLE) * CLASSES_MULTIPLE
    if whole == classes:
        return tensor.to(dtype).contiguous()
    longer = tensor.new_empty(whole, *tensor.shape[1:], dtype=dtype)
    longer[:classes].copy_(tensor)
    longer[classes:].zero_()
    return longer


def rows_of_a_chunk(rows: int, row_bytes: int) -> int:
    """Rows of a chunk: chunks are about equal, and all but the last a multiple of 64 rows."""
    most = max(LEAST_ROWS, LOGITS_BYTES // row_bytes, triton.cdiv(rows, MOST_CHUNKS))
    return min(rows, triton.cdiv(triton.cdiv(rows, triton.cdiv(rows, most)), 64) * 64)


def factors_of(dtype: torch.dtype, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the kernel and of the backward; one of them divides by the number of rows that count."""
    share, one = 1.0 / count.clamp(min=1.0), torch.ones_like(count)
    return (one * FP16_LIFT, share) if dtype == torch.float16 else (share, one)


def lift_of(dtype: torch.dtype) -> float:
    """The factor by which the gradient of the logits is scaled up until backward."""
    return FP16_LIFT if dtype == torch.float16 else 1.0


def shrink_of(dtype: torch.dtype, rows: int) -> float:
    """The factor by which a sum over the rows is scaled down until backward."""
    return max(1.0, rows / FP16_ROWS) if dtype == torch.float16 else 1.0


def launch(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    early: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    needs_any: bool,
) -> None:
    """Writes the losses of a chunk, and overwrites its logits with their gradient times `early`."""
    rows, width = logits.shape
    in_tile, block = piece_of(width)
    with on_device_of(logits):
        loss_kernel[(triton.cdiv(rows, in_tile),)](
            logits,
            target,
            losses,
            early,
            rows,
            classes,
            width,
            ignore_index,
            label_smoothing,
            label_smoothing > 0,
            needs_any,
            in_tile,
            block,
            num_warps=warps_of(in_tile * block),
        )


@triton.jit
def loss_kernel(
    logits,
    target,
    losses,
    early,
    rows,
    columns,
    width,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = logits + row * width
    wanted = tl.load(target + row, mask=inside, other=0)
    counts = inside & (wanted != ignore_index)
    loss, log_sum = losses_of(first, wanted, counts, columns, width, smoothing, SMOOTH, ROWS, BLOCK)
    tl.store(losses + row, loss, mask=inside)
    if GRADIENT:
        tl.debug_barrier()  # all warps must read the logit of the target before one overwrites it
        factor = tl.load(early)
        write_gradient(first, first, wanted, counts, log_sum, factor, inside, columns, width, smoothing, BLOCK)


@triton.jit
def scale_kernel(gradient, dloss, late, shrink, elements, share, BLOCK: tl.constexpr):
    factor = tl.load(dloss).to(tl.float32) * tl.load(late) * shrink
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * share
        for start in range(first, tl.minimum(first + share, elements), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(gradient + at, mask=at < elements, other=0.0).to(tl.float32)
            tl.store(gradient + at, (value * factor).to(gradient.dtype.element_ty), mask=at < elements)
