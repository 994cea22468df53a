"""Cross entropy with class indices: rows of any length, in blocks, with an online log-sum-exp.

Milakov, Gimelshein 2018 (arXiv 1805.02867), with one maximum and one sum for each lane, merged at the end of the row.
The forward saves one number for each row; the backward recomputes the softmax from it and the logits, in one pass.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import block_of, on_device_of, runs_in_triton, warps_of
from kitsune.kernels.layouts import MOST_PADDING

REDUCTIONS: Final = ("mean", "sum", "none")

#: Elements of a row that a program takes at once: 8 to a thread of 16 warps, a load of 16 bytes in half precision, and
#: 40 registers by ptxas for sm_90, so that three programs share a multiprocessor and one loads while others sum.
LONGEST_BLOCK: Final = 4096
#: Rows shorter than this share a program, so that four warps are busy.
SHORTEST_TILE: Final = 1024

#: The smallest finite fp32 number: only a logit of -inf is below it.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of `logits` (rows, classes) or (batch, classes, d1, ...) for the class indices in `target`.

    Semantics, shapes and the dtype of the loss are those of torch.nn.functional.cross_entropy without class weights:
    the dtype of `logits`, fp32 under autocast. Sums are in fp32. A mean over ignored targets only is nan. For a target
    that is not a class, where torch fails with a device assertion, the loss and the gradient of its row are nan. The
    backward reads `logits` again, where torch's reads their log-softmax: do not write to them before it.

    Falls back to `reference` where Triton cannot run, for empty inputs, (batch, classes, d1, ...) whose classes are not
    contiguous, target probabilities, and arguments for which torch raises its own error.
    """
    if not (runs_in_triton(logits) and logits.ndim > 1):
        return reference(logits, target, ignore_index, label_smoothing, reduction)
    rows = logits.movedim(1, -1)
    is_known = is_offered(rows, target, label_smoothing, reduction)
    if not is_known or (logits.ndim > 2 and not rows.is_contiguous()):
        return reference(logits, target, ignore_index, label_smoothing, reduction)
    dtype = loss_dtype(logits)
    loss, _, _ = forward(rows.flatten(0, -2), target.flatten(), ignore_index, label_smoothing, reduction, dtype)
    return loss.view(target.shape) if reduction == "none" else loss


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = logits.to(wide_of(logits))
    loss = F.cross_entropy(
        wide, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return loss.to(loss_dtype(logits))


def is_offered(rows: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str) -> bool:
    """Whether the kernels support it: `rows` (..., classes), a class index for each, arguments that torch accepts."""
    is_numbered = target.dtype == torch.int64 and target.device == rows.device and target.shape == rows.shape[:-1]
    return is_numbered and rows.numel() > 0 and 0 <= label_smoothing <= 1 and reduction in REDUCTIONS


def loss_dtype(logits: torch.Tensor) -> torch.dtype:
    """The dtype of torch's own loss: fp32 under autocast."""
    is_cast = torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64
    return torch.float32 if is_cast else logits.dtype


@torch.library.custom_op("kitsune::cross_entropy", mutates_args=())
def forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss in `dtype`, log-sum-exp of each row, number of targets that count: one element for a mean, else empty)."""
    logits, target = by_rows(logits), target.contiguous()
    rows, columns = logits.shape
    log_sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    counted, losses = both = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    in_tile, block = piece_of(columns)
    with on_device_of(logits):
        forward_kernel[(triton.cdiv(rows, in_tile),)](
            logits,
            target,
            losses,
            counted,
            log_sums,
            rows,
            columns,
            width_of(logits),
            logits.stride(0),
            ignore_index,
            label_smoothing,
            label_smoothing > 0,
            in_tile,
            block,
            num_warps=warps_of(in_tile * block),
        )
    if reduction == "mean":
        count, total = both.sum(1)
        return (total / count).to(dtype), log_sums, count
    loss = losses.sum() if reduction == "sum" else losses
    return loss.to(dtype, copy=True), log_sums, log_sums.new_empty(0)


@forward.register_fake
def _(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_sums = logits.new_empty(logits.shape[0], dtype=torch.float32)
    loss = torch.empty_like(log_sums, dtype=dtype) if reduction == "none" else logits.new_empty((), dtype=dtype)
    return loss, log_sums, log_sums.new_empty(() if reduction == "mean" else 0)


@torch.library.custom_op("kitsune::cross_entropy_backward", mutates_args=())
def backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sums: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype. `dloss` is one number, or one for each row."""
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    write_backward(dlogits, dloss, logits, target, log_sums, count, ignore_index, label_smoothing)
    return dlogits


def write_backward(
    dlogits: torch.Tensor,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sums: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """`backward` into `dlogits`, whose classes are contiguous.

    Gaps between its rows, if any, are its own: zeros may be written there.
    """
    logits, target, dloss = by_rows(logits), target.contiguous(), dloss.contiguous()
    rows, columns = logits.shape
    in_tile, block = piece_of(columns)
    with on_device_of(logits):
        backward_kernel[(triton.cdiv(rows, in_tile),)](
            dloss,
            logits,
            target,
            log_sums,
            count,
            dlogits,
            rows,
            columns,
            min(width_of(logits), width_of(dlogits)),
            logits.stride(0),
            dlogits.stride(0),
            ignore_index,
            label_smoothing,
            dloss.ndim,
            count.numel() > 0,
            in_tile,
            block,
            num_warps=warps_of(in_tile * block),
        )


@backward.register_fake
def _(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sums: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing, *_ = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dloss: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return backward(dloss, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing), None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def by_rows(logits: torch.Tensor) -> torch.Tensor:
    """The logits with contiguous classes. Rows may have gaps between them, as with a padded vocabulary."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def width_of(rows: torch.Tensor) -> int:
    """The columns that a program may touch: with the padding behind them, if that is memory of the tensor."""
    (count, columns), (step, _) = rows.shape, rows.stride()
    memory = rows.untyped_storage().nbytes() // rows.element_size()
    is_padded = columns < step <= columns + MOST_PADDING and rows.storage_offset() + count * step <= memory
    return step if is_padded else columns


def piece_of(columns: int) -> tuple[int, int]:
    """(rows, elements of a row) that a program processes at once."""
    block = min(block_of(columns), LONGEST_BLOCK)
    return max(1, SHORTEST_TILE // block), block


@triton.jit
def forward_kernel(
    logits,
    target,
    losses,
    counted,
    log_sums,
    rows,
    columns,
    width,
    stride,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = logits + row * stride
    wanted = tl.load(target + row, mask=inside, other=0)
    counts = inside & (wanted != ignore_index)
    loss, log_sum = losses_of(first, wanted, counts, columns, width, smoothing, SMOOTH, ROWS, BLOCK)
    tl.store(log_sums + row, log_sum, mask=inside)
    tl.store(losses + row, loss, mask=inside)
    tl.store(counted + row, counts.to(tl.float32), mask=inside)


@triton.jit
def backward_kernel(
    dloss,
    logits,
    target,
    log_sums,
    count,
    dlogits,
    rows,
    columns,
    width,
    stride,
    step,
    ignore_index,
    smoothing,
    EACH: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    wanted = tl.load(target + row, mask=inside, other=0)
    counts = inside & (wanted != ignore_index)
    log_sum = tl.load(log_sums + row, mask=inside, other=0.0)
    factor = tl.load(dloss + row * EACH, mask=counts, other=0.0).to(tl.float32)
    if MEAN:
        factor /= tl.maximum(tl.load(count), 1.0)  # the count is zero if no row counts; then only zeros are written
    write_gradient(
        logits + row * stride,
        dlogits + row * step,
        wanted,
        counts,
        log_sum,
        factor,
        inside,
        columns,
        width,
        smoothing,
        BLOCK,
    )


@triton.jit
def losses_of(
    first, wanted, counts, columns, width, smoothing, SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """(loss, log-sum-exp) of each row that counts; zeros for others, which are not read. `first` points to the rows.

    Elements from `columns` to `width` are padding. Loads are masked by the width: if it is a multiple of 16, Triton can
    vectorise them.
    """
    most = tl.full((ROWS, BLOCK), LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    plain = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = (start + tl.arange(0, BLOCK))[None, :]
        value = tl.load(first[:, None] + at, mask=counts[:, None] & (at < width), other=float("-inf")).to(tl.float32)
        value = tl.where(at < columns, value, float("-inf"))
        ratio = tl.exp(-tl.abs(value - most))  # smaller over larger: one exponential for both cases
        total = tl.where(value > most, total * ratio + 1.0, total + ratio)
        most = tl.maximum(most, value)
        if SMOOTH:
            plain += tl.where(counts[:, None] & (at < columns), value, 0.0)
    top = tl.max(most, 1)
    whole = tl.where(counts, tl.sum(total * tl.exp(most - top[:, None]), 1), 1.0)
    is_class = (wanted >= 0) & (wanted < columns)
    picked = tl.load(first + wanted, mask=counts & is_class, other=float("nan")).to(tl.float32)
    loss = tl.log(whole) + (1.0 - smoothing) * (top - picked)
    if SMOOTH:
        loss += smoothing * (top - tl.sum(plain, 1) / columns)
    return tl.where(counts, loss, 0.0), tl.where(counts, top + tl.log(whole), 0.0)


@triton.jit
def write_gradient(
    source,
    destination,
    wanted,
    counts,
    log_sum,
    factor,
    inside,
    columns,
    width,
    smoothing,
    BLOCK: tl.constexpr,
):
    """Writes (softmax - target) * `factor`; 0 in rows that do not count and in padding. May be in place."""
    is_class = (wanted >= 0) & (wanted < columns)
    factor = tl.where(is_class, factor, float("nan"))[:, None]
    peak = tl.where(is_class, wanted, -1).to(tl.int32)[:, None]
    for start in range(0, width, BLOCK):
        at = (start + tl.arange(0, BLOCK))[None, :]
        value = tl.load(source[:, None] + at, mask=counts[:, None] & (at < width), other=0.0).to(tl.float32)
        value = tl.where(at < columns, value, 0.0)  # what is in the padding may overflow
        share = smoothing / columns + tl.where(at == peak, 1.0 - smoothing, 0.0)
        slope = (tl.exp(value - log_sum[:, None]) - share) * factor
        slope = tl.where(counts[:, None] & (at < columns), slope, 0.0)
        tl.store(destination[:, None] + at, slope.to(destination.dtype.element_ty), mask=inside[:, None] & (at < width))
