"""How a batch is divided for accumulation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.capture.micro_batches import micro_batches
from kitsune.errors import WorkloadError


@given(st.integers(1, 20), st.integers(1, 25))
def test_parts_are_the_batch_in_order_and_of_about_one_size(rows, count):
    x, y = torch.arange(rows * 2).view(rows, 2), torch.arange(rows)
    parts = list(micro_batches((x, y), count))
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), x)
    assert torch.equal(torch.cat([part[1] for part, _ in parts]), y)
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    sizes = [len(part[1]) for part, _ in parts]
    assert len(sizes) == min(rows, count)
    assert max(sizes) - min(sizes) <= 1


def test_what_has_no_rows_goes_with_every_part():
    mask, named = torch.ones(7, 7), {"x": torch.zeros(6, 3), "mask": torch.ones(7, 7), "scale": 0.5}
    parts = [part for part, _ in micro_batches((named, torch.zeros(6)), 3)]
    assert [part[0]["x"].shape for part in parts] == [(2, 3)] * 3
    assert all(part[0]["scale"] == 0.5 and torch.equal(part[0]["mask"], mask) for part in parts)


def test_one_part_is_the_batch_itself():
    batch = object(), None
    ((part, share),) = micro_batches(batch, 1)
    assert (part, share) == (batch, 1.0)


@pytest.mark.parametrize("batch", [(object(), None), (torch.tensor(1.0), 3), (torch.zeros(0, 3), None)])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(WorkloadError, match="by its rows"):
        list(micro_batches(batch, 2))
