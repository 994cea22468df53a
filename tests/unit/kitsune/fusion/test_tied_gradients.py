"""The gradient of an embedding whose weight is tied to a head, in compiled graphs: merged, right, and cached."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

from kitsune.fusion import tied_gradients
from kitsune.fusion.tied_gradients import TiedGradients, merge

CLASSES = 50
IDS = torch.randint(CLASSES, (4, 8), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, is_tied=True, padding=None, penalty=0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 16, padding_idx=padding), nn.Linear(16, CLASSES)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.penalty = penalty

    def forward(self, ids):
        loss = F.cross_entropy(self.head(torch.tanh(self.embedding(ids))).flatten(0, 1).float(), ids.flatten())
        return loss + self.penalty * self.head.weight.square().sum() if self.penalty else loss


class Counted(TiedGradients):
    def __init__(self):
        self.merged = 0

    def __call__(self, graph):
        self.merged += merge(graph)

    def uuid(self):
        return None  # never from a cache


def gradients_of(forward, model):
    model.zero_grad()
    forward(IDS).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "merged"),
    [({}, 1), ({"padding": 3}, 1), ({"is_tied": False}, 0), ({"penalty": 0.1}, 1)],
    ids=["tied", "tied, with padding", "not tied", "tied, with a penalty"],
)
@pytest.mark.parametrize("half", [pytest.param(False, marks=pytest.mark.minutes), True])
def test_rows_are_added_to_the_gradient_of_the_head(given, merged, half):
    CustomGraphPass.register(Counted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counted = Model(**given), Counted()
    compiled = torch.compile(model, options={"post_grad_custom_pre_pass": counted})
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain, ours = gradients_of(model, model), gradients_of(compiled, model)
    assert counted.merged == merged
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 2e-2, "atol": 1e-4} if half else {}))


class Twice(Model):
    """The encoder and the decoder of a translation model look up one weight."""

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embedding(ids) * self.embedding(ids % 7)).flatten(0, 1), ids.flatten())


class Triplet(Model):
    def forward(self, ids):
        return sum(factor * self.embedding(ids % modulus).tanh().sum() for factor, modulus in ((1, 50), (2, 7), (3, 5)))


class Doubled(Model):
    def forward(self, ids):
        return (self.embedding(ids) + self.embedding(ids)).square().sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "merged"), [(Twice, 2), pytest.param(Triplet, 2, marks=pytest.mark.minutes), (Doubled, 0)]
)
def test_several_lookups_of_one_weight(make, merged):
    CustomGraphPass.register(Counted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counted = make(), Counted()
    for one, other in zip(
        gradients_of(torch.compile(model, options={"post_grad_custom_pre_pass": counted}), model)[:1],
        gradients_of(model, model)[:1],
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert counted.merged == merged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sums_of_the_models_own_stay_as_they_are():
    """Each of many small rows would be lost beside a large summand."""
    CustomGraphPass.register(Counted)
    torch._dynamo.reset()
    counted, x, to = Counted(), torch.full((3, 4), 2.0**24), torch.zeros(200, dtype=torch.long)

    def function(x):
        return x + torch.zeros_like(x).index_put((to,), torch.full((200, 4), 0.5), accumulate=True)

    compiled = torch.compile(function, options={"post_grad_custom_pre_pass": counted})
    torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
    assert counted.merged == 0


def test_it_leaves_the_place_to_a_pass_of_the_users():
    with torch._inductor.config.patch(post_grad_custom_pre_pass=Counted()):
        assert tied_gradients.options() == {}
    assert tied_gradients.options()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_with_the_pass_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Model()
        found.append(gradients_of(torch.compile(model, options=dict(tied_gradients.options())), model))
        hits = counters["aot_autograd"]["autograd_cache_hit"]
    assert hits == 1
    assert all(map(torch.equal, *found))
