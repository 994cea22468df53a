"""The classes of kernels, and the floor of each class."""

import pytest

from kitsune.launches.planning.kernel_classes import (
    ATTENTION,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    GAP,
    MATRIX,
    OPTIMIZER,
    REDUCTION,
    Ceilings,
    Work,
    class_of,
    class_times,
    floor_us,
)

CEILINGS = Ceilings(bytes_per_us=1000.0, flops_per_us={"bfloat16": 100.0})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("addmm", MATRIX),
        ("_scaled_mm", MATRIX),
        ("triton_tem_fused_mm_3", MATRIX),
        ("_scaled_dot_product_cudnn_attention_backward", ATTENTION),
        ("_efficient_attention_forward", ATTENTION),
        ("convolution_backward", CONVOLUTION),
        ("_slow_conv2d_forward", CONVOLUTION),
        ("conv_transpose2d", CONVOLUTION),
        ("_conv_depthwise2d", CONVOLUTION),
        ("triton_tem_fused_convolution_1", CONVOLUTION),
        ("_fused_adamw_", OPTIMIZER),
        ("_foreach_copy_", OPTIMIZER),
        ("triton_for_fused_0", OPTIMIZER),
        ("native_layer_norm_backward", ELEMENTWISE),
        ("triton_per_fused_add_native_layer_norm_3", ELEMENTWISE),
        ("triton_poi_fused_gelu_native_dropout_7", ELEMENTWISE),
        ("clamp_min", ELEMENTWISE),
        ("masked_fill", ELEMENTWISE),
        ("copysign", ELEMENTWISE),
        ("normal_", ELEMENTWISE),
        ("scatter_add", ELEMENTWISE),
        ("upsample_bilinear2d", ELEMENTWISE),
        ("_log_softmax", REDUCTION),
        ("linalg_vector_norm", REDUCTION),
        ("max_pool2d_with_indices_backward", REDUCTION),
        ("triton_red_fused_sum_12", REDUCTION),
        ("_to_copy", COPY),
        ("cast_all", COPY),
        ("cast_kernel", COPY),
        ("triton_poi_fused__to_copy_transpose_1", COPY),
        ("triton_poi_fused_2", COPY),
    ],
)
def test_a_launch_has_a_class_by_its_name(name: str, expected: str) -> None:
    assert class_of(name) == expected


def test_the_floor_is_the_slower_of_bytes_and_products() -> None:
    assert floor_us(Work(nbytes=5000), CEILINGS) == 5.0
    assert floor_us(Work(nbytes=5000, flops=200, dtype="bfloat16"), CEILINGS) == 5.0
    assert floor_us(Work(nbytes=5000, flops=2000, dtype="bfloat16"), CEILINGS) == 20.0
    assert floor_us(Work(nbytes=5000, flops=2000, dtype="int8"), CEILINGS) == 5.0, "a dtype that was not measured"


def test_classes_are_summed_up_and_the_longest_comes_first() -> None:
    names, costs_us = ("mm", "add", "mm"), (10.0, 40.0, 20.0)
    work = (Work(1000, 500, "bfloat16"), Work(8000), Work(9000))
    first, second = class_times(names, costs_us, work, CEILINGS)
    assert (first.name, first.launches, first.total_us, first.floor_us) == (ELEMENTWISE, 1, 40.0, 8.0)
    assert (second.name, second.launches, second.total_us, second.floor_us) == (MATRIX, 2, 30.0, 14.0)


def test_gaps_are_a_class_of_their_own() -> None:
    *_, gaps = class_times(("mm", "mm"), (10.0, 20.0), (Work(0), Work(0)), CEILINGS, gap_us=0.5)
    assert (gaps.name, gaps.launches, gaps.total_us, gaps.floor_us) == (GAP, 2, 1.0, 0.0)


def test_no_floor_is_above_the_time_itself() -> None:
    """A gather reads a few rows of a large table, and small launches read what the cache still holds."""
    (row,) = class_times(("embedding",), (2.0,), (Work(10**9),), CEILINGS)
    assert row.floor_us == row.total_us == 2.0


def test_a_step_without_launches_has_no_classes() -> None:
    assert class_times((), (), (), CEILINGS, gap_us=0.3) == ()
