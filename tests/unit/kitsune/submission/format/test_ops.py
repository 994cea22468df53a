"""The table of operators: what it must hold, what it must never hold, and that torch knows every name in it."""

import pytest
import torch

from kitsune.submission.format.ops import ATEN, DROPOUT, PYTHON, is_allowed
from kitsune.submission.format.targets import target, target_name

FORBIDDEN = [
    "save",
    "from_file",
    "set",
    "set_",
    "set_data",
    "resize",
    "resize_",
    "resize_as_",
    "as_strided",
    "as_strided_",
    "as_strided_scatter",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_index",
    "_unsafe_index_put",
    "_unsafe_masked_index",
    "record_stream",
    "_print",
    "_debug_has_internal_overlap",
    "_empty_affine_quantized",
    "sparse_coo_tensor",
    "_sparse_coo_tensor_unsafe",
    "_cudnn_rnn",
    "native_batch_norm",
    "_weight_norm_interface",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_thnn_fused_lstm_cell",
    "retain_grad",
    "manual_seed",
    "segment_reduce",
    "to_sparse",
    "_nested_view_from_buffer",
    "_local_scalar_dense",
]


def test_every_name_is_an_operator_of_torch():
    known = [name for name in ATEN if hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, name + "_")]
    assert len(known) > 500
    assert sorted(known) == sorted(ATEN)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_dangerous_operators_are_refused(name):
    assert not is_allowed(f"aten.{name}.default")


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_python_operators_lead_to_callables_and_back(name):
    function = target(name)
    assert callable(function)
    assert target_name(function) in (name, "py.sqrt")


@pytest.mark.parametrize(
    "name",
    ["aten.add.Tensor", "aten.relu_.default", "aten.__and__.Tensor", "aten._softmax.default", "aten.copy_.default"],
)
def test_usual_operators_lead_to_overloads_and_back(name):
    assert is_allowed(name)
    assert target_name(target(name)) == name


@pytest.mark.parametrize(
    "name",
    ["aten.add.out", "aten.div.out_mode_out", "aten.add", "add.Tensor", "aten.add.Tensor.more", "aten..Tensor",
     "aten.add.__class__", "py.eval", "py.pow", "prims.add.default", "aten.add.Tensor\n", "aten.add_.__init__", "",
     "aten.lstm.data", "aten.gru.data"],
)  # fmt: skip
def test_other_spellings_are_refused(name):
    assert not is_allowed(name)
    with pytest.raises(LookupError):
        target(name)


def test_overload_that_torch_lacks_is_a_lookup_error():
    with pytest.raises(LookupError, match=r"has no operator aten\.add\.Nothing"):
        target("aten.add.Nothing")


@pytest.mark.parametrize("name", sorted(DROPOUT))
def test_position_of_the_dropout_probability(name):
    argument, position = DROPOUT[name]
    assert target(name)._schema.arguments[position].name == argument
