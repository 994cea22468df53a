"""Models of transformers with `use_cache` on, as their configurations have it, in a loop and in a TrainStep."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.runtime.generation_cache import NOTE, configs_with_cache, without_cache
from tests.step_cases import capturing_cpu

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12)
CAPTURE = Plan.by_hand(capture="segments")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


@pytest.fixture
def device(monkeypatch):
    return capturing_cpu(monkeypatch)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(model, optimizer, **options):
    losses = []
    for _ in range(6):
        output = model(input_ids=IDS, labels=IDS, **options)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return losses, output


def test_a_loop_is_captured_and_the_model_is_as_it_was_outside_of_its_forwards(model, device):
    plain = copy.deepcopy(model)
    optimizer = KitsuneOptimizer(sgd(model), plan=CAPTURE)
    losses, output = trained(model, optimizer)
    assert optimizer.counts["captured"] > 0 and NOTE in optimizer.report.notes
    assert output.past_key_values is None and model.config.use_cache is True
    assert losses == pytest.approx(trained(plain, sgd(plain))[0], rel=1e-5)
    assert model.eval()(input_ids=IDS).past_key_values.get_seq_length() == IDS.shape[1]
    assert model.generate(IDS[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    optimizer.close()


def test_a_call_that_asks_for_a_cache_gets_one(model, device):
    optimizer = KitsuneOptimizer(sgd(model), plan=CAPTURE)
    _, output = trained(model, optimizer, use_cache=True)
    assert output.past_key_values.get_seq_length() == IDS.shape[1]
    assert "DynamicCache" in optimizer.report.declined["capture"]
    optimizer.close()


@pytest.mark.parametrize(("knobs", "is_left_out"), [({"precision": "bf16"}, False), ({"compile": "default"}, True)])
def test_a_step_that_reads_the_loss_only_leaves_it_out_where_it_is_compiled(model, monkeypatch, knobs, is_left_out):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen = []
    attention = model.model.layers[0].self_attn
    with TrainStep(model, None, sgd(model), Plan.by_hand(**knobs)) as step:
        attention.register_forward_pre_hook(lambda *given: seen.append(given[2]["past_key_values"]), with_kwargs=True)
        step({"input_ids": IDS, "labels": IDS})
        assert (NOTE in step.report.notes) == is_left_out
    assert [each is None for each in seen] == [is_left_out]


def test_it_is_on_again_after_an_error(model):
    [config] = configs_with_cache(model)
    with pytest.raises(ZeroDivisionError), without_cache([config]):
        divmod(1, config.use_cache)
    assert config.use_cache is True


def test_configurations_of_others_are_left_alone():
    class Settings:
        use_cache = True

    model = nn.Linear(2, 2)
    model.config = Settings()
    assert configs_with_cache(model) == []
