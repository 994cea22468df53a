"""What a saved state restores, and what it leaves as it is."""

import pytest
import torch

from kitsune.device.saved_state import SavedState
from kitsune.errors import CaptureError

CPU = torch.device("cpu")


def test_tensors_and_generators_are_restored_at_the_end_of_the_block() -> None:
    tensor, own = torch.arange(4.0), torch.Generator().manual_seed(1)
    expected, drawn, drawn_by_own = tensor.clone(), torch.Generator(), torch.Generator().manual_seed(1)
    drawn.set_state(torch.get_rng_state())
    with SavedState(lambda: [tensor], CPU, [own]) as state:
        tensor.mul_(3)
        torch.rand(1), torch.rand(1, generator=own)
        assert state.has_changed()
    assert torch.equal(tensor, expected)
    assert not state.has_changed()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=drawn))
    assert torch.equal(torch.rand(2, generator=own), torch.rand(2, generator=drawn_by_own))


def test_a_tensor_of_another_shape_is_restored_if_it_has_as_many_elements() -> None:
    tensor = torch.arange(4.0)
    with SavedState(lambda: [tensor]):
        tensor.unsqueeze_(0).mul_(2)
    assert torch.equal(tensor, torch.arange(4.0)[None])


def test_the_tensor_that_has_come_in_the_place_of_another_is_restored() -> None:
    held = [torch.arange(4.0)]
    with SavedState(lambda: held):
        held[0] = torch.zeros(4)
    assert torch.equal(held[0], torch.arange(4.0))


def test_the_rest_is_restored_where_a_tensor_has_another_size() -> None:
    held = [torch.zeros(4), torch.zeros(2)]
    state = SavedState(lambda: held, resized="it has grown")
    held[0] = torch.ones(5)
    held[1].add_(1)
    with pytest.raises(CaptureError, match="it has grown"):
        state.restore()
    assert held[1].tolist() == [0, 0]


def test_without_a_reason_a_tensor_of_another_size_is_left_as_it_is() -> None:
    held = [torch.zeros(4)]
    with SavedState(lambda: held):
        held[0] = torch.ones(5)
    assert held[0].tolist() == [1] * 5
