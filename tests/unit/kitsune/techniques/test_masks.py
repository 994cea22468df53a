"""The attention mask of a batch is left out where it shows every position, and read where it does not."""

import copy

import pytest
import torch
from torch._inductor.exc import InductorError

from kitsune.capture.program_cache import PATIENCE
from kitsune.knobs import clashes
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques import compile as technique
from kitsune.techniques import facts_of, observed_facts, why_not
from kitsune.workload import Workload
from tests.masked_language import ROWS, TOKENS, Language, batch_of, losses_of_a_loop, plain_losses
from tests.step_cases import sgd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch's compiler
CPU = torch.device("cpu")


@pytest.fixture
def dropped(monkeypatch):
    """Of how many attentions masks were left out, in each graph for Inductor, which here returns it as it is."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, _, **__: graph)
    counts, real = [], technique.drop_constant_masks

    def counted(graph):
        counts.append(real(graph))
        return counts[-1]

    monkeypatch.setattr(technique, "drop_constant_masks", counted)
    return counts


BATCHES = [batch_of(padded) for padded in (0, 0, 3, 0, *[5] * PATIENCE, 0)]
#: Padded batches are compiled for once they are frequent.
CAUGHT = {"dropped": [1, 0], "given": [0]}


@pytest.mark.parametrize("choice", ["dropped", "given"])
def test_a_step_trains_as_before_on_full_and_on_padded_batches(dropped, choice):
    model = Language()
    plan = Plan.by_hand(compile="default", masks=choice)
    with TrainStep(model, None, sgd(model.parameters()), plan=plan) as step:
        losses = [step(copy.copy(batch)) for batch in BATCHES]
    torch.testing.assert_close(losses, plain_losses(BATCHES))
    assert dropped == CAUGHT[choice]


def test_a_loop_of_the_users_own_trains_as_before(dropped):
    model = Language()
    optimizer = KitsuneOptimizer(sgd(model.parameters()), plan=Plan.by_hand(compile="default", masks="dropped"))
    losses = losses_of_a_loop(model, optimizer, BATCHES)
    optimizer.close()
    torch.testing.assert_close(losses, plain_losses(BATCHES))
    assert dropped == [1, 0]


def test_a_loop_goes_on_with_its_mask_when_the_compiler_fails(monkeypatch):
    def fail(*_, **__):
        raise InductorError(RuntimeError("no compiler"), None)

    monkeypatch.setattr(torch._inductor, "compile", fail)
    model = Language()
    optimizer = KitsuneOptimizer(sgd(model.parameters()), plan=Plan.by_hand(compile="default", masks="dropped"))
    losses = losses_of_a_loop(model, optimizer, BATCHES[:3])
    assert "compile" in optimizer.report.declined
    optimizer.close()
    torch.testing.assert_close(losses, plain_losses(BATCHES[:3]))


def test_parts_of_a_batch_have_a_mask_of_their_size(dropped):
    class Halved(Language):
        def forward(self, input_ids, attention_mask=None, labels=None):
            assert attention_mask.shape == input_ids.shape == (ROWS // 2, TOKENS)
            twice = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
            return super().forward(**{name: value.repeat(2, 1) for name, value in twice.items()})

    model = Halved()
    plan = Plan.by_hand(compile="default", masks="dropped")
    with TrainStep(model, None, sgd(model.parameters()), plan=plan, accumulation_steps=2) as step:
        step(batch_of(0))
    assert dropped == [1]


def test_it_is_offered_where_the_batch_has_a_mask_that_shows_every_position():
    for batch, reason in (
        (batch_of(0), None),
        (batch_of(3), "the batch has no attention_mask that shows every position"),
    ):
        model = Language()
        facts = observed_facts(Workload(model, None, sgd(model.parameters()), (batch, None)), CPU)
        assert why_not("masks", "dropped", facts) == reason
    assert why_not("masks", "dropped", facts_of(model, sgd(model.parameters()), CPU)) is None  # no batch is known


def test_without_a_compiler_it_is_the_models_own():
    assert "without torch.compile it is for the model to look at its mask" in str(
        next(clashes({"masks": "dropped", "compile": "off"}))
    )
