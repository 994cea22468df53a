"""Yardsticks of the long gate: eager steps in the candidate's formats, one of them with rounded parameters."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kitsune import Workload
from kitsune.long_proof import LongProof
from tuner.building.probe import probe_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.long_gate import prove_long
from tuner.numerics.long_training import LOST_IN_ROUNDING
from tuner.numerics.restarts import NOT_ROUNDED, RoundedStep, Yardsticks
from tuner.numerics.tensor_errors import StepErrors, TensorErrors, is_lost
from tuner.numerics.training_trace import model_state

ROUNDED = {"precision": "bf16", "compile": "default", "activations": "bf16"}


class Embedded(torch.nn.Module):
    """An embedding, a norm and a product. `dtypes`: of the embedding's results."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = torch.nn.Embedding(20, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 20)
        self.register_buffer("scale", torch.full((8,), 1.001))
        self.dtypes = set()

    def forward(self, x):
        embedded = self.embedding(x)
        self.dtypes.add(embedded.dtype)
        return self.head(self.norm(embedded * self.scale.to(embedded.dtype))).flatten(0, 1)


class HardCoded(Embedded):
    """Runs with parameters in fp32 only."""

    def forward(self, x):
        torch.mm(self.embedding.weight, torch.ones(8, 1, dtype=torch.float32))
        with torch.autocast("cpu", enabled=False):
            torch.mm(self.embedding.weight, torch.ones(8, 1))
        return super().forward(x)


def workload_of(model: torch.nn.Module) -> Workload:
    tokens = torch.randint(20, (4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, F.cross_entropy, optimizer, (tokens, tokens.flatten()))


def embedded() -> Workload:
    return workload_of(Embedded())


def hard_coded() -> Workload:
    return workload_of(HardCoded())


def job_of(make: str, **knobs) -> Job:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    return Job(workload=f"{Path(__file__)}:{make}", device="cpu", arms=arms)


def gradients(yardsticks, start):
    results = yardsticks.runs(model_state(start), start.batch)
    found = [[each.clone() for each in result.gradients] for result in results]
    yardsticks.close()
    return found


def test_rounded_activations_have_a_yardstick_with_rounded_parameters():
    start = embedded()
    yardsticks = Yardsticks(job_of("embedded", **ROUNDED), 2, randomness=True)
    same, changed, rounded = gradients(yardsticks, start)
    assert {each.dtype for each in (*same, *changed)} == {torch.float32}
    assert {each.dtype for each in rounded} == {torch.bfloat16}
    for parameter in start.model.parameters():
        parameter.data = parameter.data.bfloat16()
    x, y = start.batch
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(start.model(x), y).backward()
    assert start.model.dtypes == {torch.bfloat16}
    torch.testing.assert_close(rounded, [each.grad for each in start.model.parameters()], rtol=0, atol=0)
    assert 0 < (same[0] - rounded[0].float()).norm() < 0.05 * same[0].norm()


@pytest.mark.parametrize("knobs", [{"precision": "bf16"}, {"precision": "bf16", "activations": "given"}, {}])
def test_other_plans_have_none(knobs):
    yardsticks = Yardsticks(job_of("embedded", **knobs), 2, randomness=True)
    assert yardsticks.note == ""
    assert len(gradients(yardsticks, embedded())) == 2


def test_a_model_that_does_not_run_with_rounded_parameters_has_none_and_a_note():
    yardsticks = Yardsticks(job_of("hard_coded", **ROUNDED), 1, randomness=True)
    assert yardsticks.note.startswith(NOT_ROUNDED)
    assert len(gradients(yardsticks, hard_coded())) == 1


class Strict(Embedded):
    """Asserts its dtype, as code of users does."""

    def forward(self, x):
        assert self.embedding.weight.dtype is not torch.bfloat16, "weights must be wide"
        return super().forward(x)


def strict() -> Workload:
    return workload_of(Strict())


def test_whatever_a_model_raises_is_a_note():
    assert "weights must be wide" in Yardsticks(job_of("strict", **ROUNDED), 1, randomness=True).note


def test_running_out_of_memory_is_not(monkeypatch):
    def crowded(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RoundedStep, "__call__", crowded)
    with pytest.raises(torch.OutOfMemoryError):
        Yardsticks(job_of("embedded", **ROUNDED), 1, randomness=True)


class Pole(Embedded):
    """A parameter near 1, which rounds to 1 in bf16, where its gradient is infinite (as in an LRU)."""

    def __init__(self):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.full((8,), 0.9985))

    def forward(self, x):
        return super().forward(x) + ((1 - self.decay.float() ** 2).sqrt().sum() * 1e-3)


def crossed(logits, y):
    """Cross entropy alone does not see what is added to all logits."""
    return F.cross_entropy(logits, y) + logits.mean()


def pole() -> Workload:
    model, tokens = Pole(), torch.randint(20, (4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return Workload(model, crossed, optimizer, (tokens, tokens.flatten()))


@pytest.mark.minutes
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor, at its first import
def test_a_yardstick_that_loses_a_gradient_is_left_out():
    """A right candidate passes, and the proof says why there is a yardstick less."""
    job = job_of("pole", **ROUNDED).model_copy(update={"budget_s": 4.0})
    found = prove_long(job, probe_workload(job))
    assert isinstance(found, LongProof), found
    assert LOST_IN_ROUNDING in found.notes


@pytest.mark.parametrize(
    ("rounded", "eager", "lost"), [(0.2, 0.01, False), (5.0, 0.01, True), (5.0, 2.0, False), (1e30, 0.5, True)]
)
def test_lost_is_what_only_the_rounded_one_has_lost(rounded, eager, lost):
    def comparison(error: float) -> StepErrors:
        gradients = TensorErrors(errors=[0.01, error], shares=[1.0, 1.0], sizes=[1.0, 1.0])
        return StepErrors(loss=0.0, whole=0.01, gradients=gradients, buffers=TensorErrors([], [], []))

    assert is_lost(comparison(rounded), comparison(eager)) is lost


def test_a_training_with_rounded_parameters_has_fp32_weights():
    """Each of its updates is smaller than half a unit of bf16, so bf16 weights would stay as they are."""
    start = embedded()
    before = start.model.head.weight.detach().clone()
    step = RoundedStep(job_of("embedded", **ROUNDED), randomness=True).updating(start)
    start.optimizer.param_groups[0]["lr"] = 1e-4
    losses = [step(*start.batch).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert {each.grad.dtype for each in start.model.parameters()} == {torch.float32}
    change = (start.model.head.weight - before).norm() / before.norm()
    assert 0 < change < 1e-3
