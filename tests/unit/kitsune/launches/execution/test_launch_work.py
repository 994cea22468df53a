"""What launches have to do at least, by their shapes, and what a CPU can do."""

from typing import Any

import pytest
import torch

import kitsune.fusion.padded_outputs
import kitsune.fusion.patterns  # noqa: F401 - all operators
from kitsune.launches.execution.launch_work import ceilings, flops_of, work_of
from kitsune.launches.model.recording import Call, TensorView
from kitsune.launches.planning.kernel_classes import Work
from tests.unit.kitsune.launches.steps import CPU, recorded

F = torch.nn.functional
ROWS, INNER, COLUMNS = 8, 16, 4


def work_by_name(step) -> dict[str, Work]:
    recording = recorded(step)
    names = [launch.name for launch in recording.graph.launches]
    return dict(zip(names, work_of(recording), strict=True))


def test_a_product_has_its_bytes_and_its_operations() -> None:
    one, other = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    nbytes = 4 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)
    assert work_by_name(lambda: one @ other)["mm"] == Work(nbytes, 2 * ROWS * INNER * COLUMNS, "float32")


def test_the_dtype_is_that_of_the_operands() -> None:
    one, other = (torch.randn(ROWS, ROWS).bfloat16() for _ in range(2))
    assert work_by_name(lambda: one @ other)["mm"].dtype == "bfloat16"


def test_a_convolution_and_its_backward_have_operations() -> None:
    x = torch.randn(2, 3, 8, 8)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    found = work_by_name(lambda: torch.autograd.grad(F.conv2d(x, weight).sum(), weight))
    operations = 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3
    assert found["convolution"].flops == operations
    assert found["convolution_backward"].flops == operations, "the images need no gradient"


def test_attention_has_operations() -> None:
    """Of a GPU's operation; that of a CPU has no formula."""
    shape = (1, 2, ROWS, INNER)
    q, k, v = (TensorView(number, torch.bfloat16, shape, (256, 128, INNER, 1), 0) for number in range(3))
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    call = Call(attention, (q, k, v), {}, results=(q, None, None))
    assert flops_of(call) == 2 * 2 * 2 * ROWS * ROWS * INNER


def own_calls() -> dict[str, tuple[list[Any], list[tuple[int, ...]], int]]:
    """Operator of ours -> its arguments, shapes of its results, and the operations of its products."""
    heads, tokens = (2, 3, ROWS, INNER), 2 * ROWS
    product = 2 * tokens * INNER * COLUMNS
    packed = (2, ROWS, 3, 3, INNER)
    image, window, made = (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6)
    scores = 2 * 2 * 3 * ROWS * ROWS * INNER
    loss = [-100, 0.0, "mean", torch.float32]
    return {
        "linear_activation": ([(tokens, INNER), (COLUMNS, INNER), None, "gelu"], [(tokens, COLUMNS)] * 2, product),
        "linear_activation_backward": ([(tokens, INNER), (INNER, COLUMNS), (tokens, COLUMNS)], [()], product),
        "gated_linear": (
            [(tokens, INNER), (COLUMNS, INNER), (COLUMNS, INNER), "silu"],
            [(tokens, COLUMNS)] * 3,
            2 * product,
        ),
        "gated_linear_backward": (
            [(tokens, INNER), (INNER, COLUMNS), (tokens, COLUMNS), (tokens, COLUMNS)],
            [(tokens, 2 * COLUMNS)],
            product,
        ),
        "gated_linear_input": (
            [(tokens, 2 * COLUMNS), (COLUMNS, INNER), (COLUMNS, INNER)],
            [(tokens, INNER)],
            2 * product,
        ),
        "linear_cross_entropy": (
            [(tokens, INNER), (COLUMNS, INNER), (tokens,), None, *loss, True, True, False],
            [()] * 5,
            3 * product,
        ),
        "attention": ([heads] * 3 + [None, 1.0, False, 0.0], [heads, heads[:3]], 2 * scores),
        "attention_backward": ([heads] * 5 + [heads[:3], None, 1.0, False, 0.0], [heads] * 3, 5 * scores),
        "packed_attention": ([packed, None, 1.0, False, 0.0], [heads, heads[:3]], 2 * scores),
        "packed_attention_backward": ([heads, packed, heads, heads[:3], None, 1.0, False, 0.0], [packed], 5 * scores),
        "stem_convolution": ([image, window], [made], 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3),
        "stem_convolution_backward": ([made, image, window], [window], 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3),
        "pointwise_convolution": (
            [(2, INNER, 5, 6), (COLUMNS, INNER, 1, 1)],
            [(2, COLUMNS, 5, 6), (COLUMNS,), (COLUMNS,)],
            2 * 2 * 5 * 6 * INNER * COLUMNS,
        ),
        "padded_linear": ([(2, ROWS, INNER), (COLUMNS, INNER), None], [(2, ROWS, COLUMNS)], product),
        "padded_linear_backward": (
            [(2, ROWS, COLUMNS), (2, ROWS, INNER), (COLUMNS, INNER), True, True, False],
            [()] * 3,
            2 * product,
        ),
    }


@pytest.mark.parametrize("name", own_calls())
def test_products_of_ours_have_operations(name: str) -> None:
    arguments, results, operations = own_calls()[name]

    def viewed(value: Any) -> Any:
        is_shape = isinstance(value, tuple) and value not in ((1, 1), (0, 0))
        return TensorView(0, torch.bfloat16, value, (1,) * len(value), 0) if is_shape else value

    call = Call(
        getattr(torch.ops.kitsune, name).default, tuple(map(viewed, arguments)), {}, results=tuple(map(viewed, results))
    )
    assert flops_of(call) == operations


def test_a_form_without_a_formula_has_no_operations() -> None:
    one = TensorView(0, torch.float32, (ROWS, INNER), (INNER, 1), 0)
    assert flops_of(Call(torch.ops.aten.mm.default, (one, one), {}, results=(one,))) == 0


def test_what_is_no_product_has_bytes_only() -> None:
    x = torch.randn(ROWS, INNER)
    assert work_by_name(lambda: x + 1)["add"] == Work(2 * 4 * ROWS * INNER, 0, "float32")


def test_ceilings_are_measured_for_floating_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitsune.launches.execution.launch_work.COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("kitsune.launches.execution.launch_work.ROWS", {"cpu": 64})
    before = torch.get_rng_state()
    found = ceilings(CPU, ["float32", "int64", "", "bfloat16"])
    assert torch.equal(torch.get_rng_state(), before)
    assert found.bytes_per_us > 0
    assert set(found.flops_per_us) == {"float32", "bfloat16"}
    assert min(found.flops_per_us.values()) > 0
