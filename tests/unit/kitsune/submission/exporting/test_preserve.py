import logging
import random
import warnings

import pytest
import torch
from torch import nn

from kitsune.submission.exporting.preserve import preserved, quiet

CPU = torch.device("cpu")


def test_everything_is_put_back_even_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.note = "before"
    norm = model[1]
    buffer, random_state, python_state = norm.running_mean, torch.get_rng_state(), random.getstate()

    def disturb() -> None:
        torch.rand(3)
        random.random()
        norm.running_mean.add_(1)
        norm.running_var = torch.zeros(2)
        norm.register_buffer("more", torch.ones(1))
        norm.eval()
        model.note = "after"
        model.extra = 1
        raise KeyError

    with pytest.raises(KeyError), preserved(model, CPU):
        disturb()
    assert norm.running_mean is buffer
    assert norm.running_mean.tolist() == [0, 0]
    assert norm.running_var.tolist() == [1, 1]
    assert "more" not in dict(norm.named_buffers())
    assert norm.training
    assert model.note == "before"
    assert not hasattr(model, "extra")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state


def test_quiet_lets_warnings_and_logs_through_again():
    level = logging.root.manager.disable
    with quiet():
        warnings.warn("unheard", stacklevel=1)
        assert not logging.getLogger("torch").isEnabledFor(logging.ERROR)
    assert logging.root.manager.disable == level
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
