"""What a step asked of torch's memory, and what ran in it, as the difference between its two ends."""

import pytest
import torch

from kitsune.profiler import step_counter
from kitsune.profiler.step_counter import StepCount, StepCounter
from kitsune.profiler.streams import StreamProfile

NOTHING = StreamProfile((), 0.0, 0.0)


class Watch:
    def __init__(self, device):
        self.is_over = False

    def end(self):
        self.is_over = True
        return NOTHING

    drop = end


@pytest.fixture
def stats(monkeypatch):
    """What torch's allocator of a pretended GPU has counted so far."""
    found = {"allocation.all.allocated": 1000, "segment.all.allocated": 20, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(found))
    monkeypatch.setattr(step_counter, "StreamWatch", Watch)
    return found


def test_a_request_that_cuda_was_not_asked_for_is_a_hit(stats):
    counter = StepCounter(torch.device("cuda", 0))
    stats.update({"allocation.all.allocated": 1040, "segment.all.allocated": 30})
    found = counter.end()
    assert found == StepCount(NOTHING, allocations=40, hits=30)
    assert found.hit_rate == 0.75


def test_a_step_that_asks_for_nothing_has_no_rate(stats):
    assert StepCounter(torch.device("cuda", 0)).end().hit_rate is None


def test_without_an_allocator_of_torchs_own_nothing_is_asked(stats):
    stats.clear()
    assert StepCounter(torch.device("cuda", 0)).end() == StepCount(NOTHING, 0, 0)


def test_what_is_dropped_is_over(stats):
    counter = StepCounter(torch.device("cuda", 0))
    counter.drop()
    assert counter._watch.is_over
