"""Models of transformers with `use_cache` on, as their configurations have it, in a loop."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kitsune import KitsuneOptimizer, Plan
from kitsune.capture.unkept_caches import UnkeptCache
from tests.step_cases import capturing_cpu

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12)
CAPTURE = Plan.by_hand(capture="segments")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


@pytest.fixture(autouse=True)
def device(monkeypatch):
    return capturing_cpu(monkeypatch)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole(model, **options):
    return model(input_ids=IDS, labels=IDS, **options)


def in_chunks(model):
    """The second chunk attends to the first one."""
    first = model(input_ids=IDS[:, :6])
    return model(input_ids=IDS[:, 6:], labels=IDS[:, 6:], past_key_values=first.past_key_values)


def trained(forward, model, optimizer, steps=7):
    losses = []
    for _ in range(steps):
        output = forward(model)
        output[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output[0].item())
    return losses, output


@pytest.mark.parametrize("options", [{}, {"return_dict": False}], ids=str)
def test_a_loop_is_captured_and_everything_else_stays_where_it_is(model, options):
    plain = copy.deepcopy(model)
    optimizer = KitsuneOptimizer(sgd(model), plan=CAPTURE)
    losses, output = trained(lambda model: whole(model, **options), model, optimizer)
    expected, original = trained(lambda model: whole(model, **options), plain, sgd(plain))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert optimizer.counts["captured"] > 0 and any("past_key_values" in note for note in optimizer.report.notes)
    assert len(output) == len(original) and isinstance(output[2], UnkeptCache)
    assert model.config.use_cache
    assert whole(model.eval()).past_key_values.get_seq_length() == IDS.shape[1]
    assert model.generate(IDS[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    optimizer.close()


def test_what_reads_a_cache_that_was_not_kept_says_why(model):
    optimizer = KitsuneOptimizer(sgd(model), plan=CAPTURE)
    _, output = trained(whole, model, optimizer)
    cache = output.past_key_values
    with pytest.raises(AttributeError, match="'get_seq_length': the forward that made this DynamicCache was captured"):
        model(input_ids=IDS, past_key_values=cache)
    assert (
        not hasattr(cache, "dtype")
        and repr(copy.deepcopy(cache)) == repr(cache) == "<a DynamicCache that was not kept>"
    )
    optimizer.close()


def test_a_loop_that_passes_caches_on_is_not_captured(model):
    plain = copy.deepcopy(model)
    optimizer = KitsuneOptimizer(sgd(model), plan=CAPTURE)
    losses, _ = trained(in_chunks, model, optimizer, 30)
    assert losses == pytest.approx(trained(in_chunks, plain, sgd(plain), 30)[0], rel=1e-5)
    assert "caches" in optimizer.report.declined["capture"]
    optimizer.close()
