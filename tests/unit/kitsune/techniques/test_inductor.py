"""inductor: a set of Inductor's flags reaches its compiler, and is declined where torch does not have the flag."""

import pytest
import torch
from torch.nn import functional as F

from kitsune import Plan, TrainStep
from kitsune.knobs import KNOBS, clashes
from kitsune.techniques import inductor
from tests.step_cases import sgd

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor, at its first import

SETS = [choice for choice in KNOBS["inductor"].choices if choice != "default"]


def trained(**knobs):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), Plan.by_hand(**knobs)) as step:
        losses = [step(torch.ones(4, 8), torch.zeros(4, 4)).item() for _ in range(3)]
        return losses, step.report


@pytest.fixture
def on_gpu(monkeypatch):
    """The choice applies, though there is no GPU."""
    monkeypatch.setattr(inductor.Inductor, "why_not", lambda *_: None)


@pytest.fixture
def options(monkeypatch):
    """Inductor's options of each compilation."""
    found = []
    given = torch._inductor.compile

    def compiled(graph, inputs, options):
        found.append(options)
        return given(graph, inputs, options=options)

    monkeypatch.setattr(torch._inductor, "compile", compiled)
    return found


@pytest.mark.parametrize("choice", SETS)
def test_its_flags_reach_inductor_and_the_step_is_the_same(on_gpu, options, choice):
    plain, _ = trained(compile="default")
    losses, report = trained(compile="default", inductor=choice)
    assert losses == pytest.approx(plain)
    assert report.applied["inductor"] == choice
    flags = inductor.FLAGS[choice].items()
    assert not flags <= options[0].items()
    assert flags <= options[1].items()


def test_a_flag_that_torch_does_not_have_is_declined_and_the_step_trains(on_gpu, monkeypatch):
    monkeypatch.setitem(inductor.FLAGS, "no_mix_order", {"triton.of_another_version": True})
    _, report = trained(compile="default", inductor="no_mix_order")
    assert set(report.declined) == {"inductor"}
    assert "of_another_version" in report.declined["inductor"]
    assert report.applied == {"compile": "default"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_declined():
    _, report = trained(compile="default", inductor="no_mix_order")
    assert report.declined == {"inductor": "its flags are for kernels of a GPU"}


def test_every_choice_has_its_flags_and_needs_the_compiler():
    assert list(inductor.FLAGS) == SETS
    for choice in SETS:
        assert [knob.name for knob, _ in clashes({"inductor": choice})] == ["inductor"]
