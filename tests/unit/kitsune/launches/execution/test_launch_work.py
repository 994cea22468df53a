"""What launches have to do at least, by their shapes, and what a CPU can do."""

import pytest
import torch

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
