"""Which writes are seen in a graph, and that no match reads what was written in between, or has it written later."""

import pytest
import torch
import torch.nn.functional as F

from kitsune.fusion.writes import is_written, mutates
from tests.unit.kitsune.fusion.fused import WIDTH, WrittenRmsNorm, engine, normal, stats_of, step


@torch.library.custom_op("kitsune_tests::double_into", mutates_args=("x",))
def double_into(by: float, x: torch.Tensor) -> None:
    x.mul_(by)


def by_index(x):
    x[0] = 1


def by_view(x):
    x.view(-1)[:2].fill_(0)


def by_matmul(x):
    x @= torch.eye(WIDTH)


WRITES = {
    "a method": lambda x: x.mul_(2),
    "a method of a view": by_view,
    "what is detached": lambda x: x.detach().mul_(2),
    "the data": lambda x: x.data.mul_(2),
    "a method of operators": lambda x: x.__imul__(2),
    "an index": by_index,
    "an operator": by_matmul,
    "out": lambda x: torch.add(x, 1, out=x),
    "a function": torch.relu_,
    "inplace by name": lambda x: F.silu(input=x, inplace=True),
    "inplace by position": lambda x: F.hardtanh(x, 0.0, 6.0, True),
    "an operator of aten": lambda x: torch.ops.aten.mul_.Tensor(x, x),
    "an operator of a user": lambda x: double_into(2.0, x),
    "several at once": lambda x: torch._foreach_mul_([x, x + 1], 2.0),
}


def nodes_of(function, *inputs):
    """As Dynamo captures them."""
    found = []

    def keep(graph, _):
        found.extend(graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return found


def named(nodes, method):
    return next(node for node in nodes if node.target == method)


@pytest.mark.parametrize("way", WRITES)
def test_a_write_is_seen_of_what_is_written_and_of_nothing_else(way):
    def function(x):
        y, other = x.cos(), x.sin()
        WRITES[way](y)
        return y + other

    nodes = nodes_of(function, torch.ones(WIDTH, WIDTH))
    cosine, sine = named(nodes, "cos"), named(nodes, "sin")
    assert is_written([cosine]) and not is_written([sine])
    assert sum(map(mutates, nodes)) == 1


def test_what_a_write_only_reads_is_not_written():
    def function(x):
        y, other = x.cos(), x.sin()
        y += other
        torch.add(y, other, out=y)
        torch.ops.aten.add_.Tensor(y, other)
        return y

    nodes = nodes_of(function, torch.ones(3))
    assert not is_written([named(nodes, "sin")]) and is_written([named(nodes, "cos")])
    assert sum(map(mutates, nodes)) == 3


# What a pattern follows -----------------------------------------------------------------------------------------------


def prefix(size):
    mask = torch.triu(torch.ones(size, size), diagonal=1).bool()
    mask[:, :2] = False
    return mask


def of_edited_ones(size):
    ones = torch.ones(size, size)
    ones[:, :3] = 0
    return torch.triu(ones, 1).bool()


def of_ones_edited_by_a_view(size):
    ones = torch.ones(size, size)
    ones.view(-1)[:3].zero_()
    return torch.triu(ones, 1).bool()


def turned(size):
    mask = torch.triu(torch.ones(size, size), diagonal=1).bool()
    mask.logical_not_()
    mask.fill_diagonal_(False)
    return mask


def by_its_floats(size):
    floats = torch.triu(torch.ones(size, size), diagonal=1)
    floats.mul_(torch.eye(size).flip(0))
    return floats.bool()


@pytest.mark.parametrize("form", ["as written", "exported"])
@pytest.mark.parametrize("mask_of", [prefix, of_edited_ones, of_ones_edited_by_a_view, turned, by_its_floats])
def test_a_causal_mask_that_is_edited_is_read_as_it_is(mask_of, form):
    class Masked(torch.nn.Module):
        def forward(self, scores):
            return F.softmax(scores.masked_fill(mask_of(scores.shape[-1]), float("-inf")), dim=-1)

    scores = normal(2, 5, 5).detach()
    module = Masked() if form == "as written" else torch.export.export(Masked(), (scores,)).module()
    fusing = engine()
    ours, wanted = fusing.fuse(module)(scores), Masked()(scores)
    kept = ~wanted.isnan()  # a row of which nothing is left is NaN by torch, and 0 by the kernel
    torch.testing.assert_close(ours[kept], wanted[kept])
    assert fusing.get_fusion_stats().matches == {"softmax": 1}


def test_a_mask_that_is_edited_where_no_gradient_is_taken_is_read_as_it_is():
    class Masked(torch.nn.Module):
        def forward(self, scores):
            mask = torch.triu(torch.ones(5, 5), diagonal=1)
            with torch.no_grad():
                mask[:, :2] = 0
            return F.softmax(scores.masked_fill(mask.bool(), float("-inf")), dim=-1)

    scores = normal(2, 5, 5).detach()
    for module in (Masked(), torch.export.export(Masked(), (scores,)).module()):
        torch.testing.assert_close(engine().fuse(module)(scores), Masked()(scores))


# What a backward reads ------------------------------------------------------------------------------------------------

LOGITS, CLASSES = normal(6, 13), torch.arange(6)


def without_gradients(y):
    with torch.no_grad():
        y.mul_(3.0)


LATER = {
    "detached": lambda y: y.detach().mul_(3.0),
    "without gradients": without_gradients,
    "the data": lambda y: y.data.mul_(3.0),
    "a view": lambda y: y.detach().view(-1)[:5].zero_(),
}


@pytest.mark.parametrize("way", LATER)
def test_logits_that_are_written_after_their_loss_stay_with_torch(way):
    def function(x):
        y = x * 2
        loss = F.cross_entropy(y, CLASSES)
        LATER[way](y)
        return loss

    fusing = engine()
    for one, other in zip(step(fusing.fuse(function), [], LOGITS), step(function, [], LOGITS), strict=True):
        torch.testing.assert_close(one, other)
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    assert [one.reason for one in stats.refused] == ["something is written afterwards into what its backward may read"]


def test_logits_may_be_written_where_there_is_no_backward_and_before_their_loss():
    def function(x):
        y = x * 2
        y.mul_(3.0)
        loss = F.cross_entropy(y, CLASSES)
        y += loss
        return loss

    x = LOGITS.detach()
    torch.testing.assert_close(engine().fuse(function)(x), function(x))
    assert stats_of(function, x).matches == {"cross_entropy": 1}


def test_what_is_written_by_reading_the_logits_does_not_matter():
    def function(x):
        y = x * 2
        loss = F.cross_entropy(y, CLASSES)
        total = torch.zeros_like(y)
        total += y.detach()
        return loss + total.sum()

    assert stats_of(function, LOGITS).matches == {"cross_entropy": 1}


@pytest.mark.parametrize("adds", [False, True])
def test_a_residual_stream_in_half_precision_that_is_written_after_its_norm(adds):
    """Torch keeps the cast of it; the kernel would keep the stream."""
    norm = WrittenRmsNorm().bfloat16()

    def function(x, branch):
        stream = x + branch if adds else x * 2
        normed = norm(stream)
        stream += normed.detach()
        return normed + stream

    given = [normal(2, 3, WIDTH, seed=seed).detach().bfloat16().requires_grad_() for seed in (0, 1)]
    ours, wanted = step(engine().fuse(function), [norm.weight], *given), step(function, [norm.weight], *given)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert stats_of(function, *given).matches == {}


def test_what_a_kernel_gives_shares_its_memory_with_the_views_of_it():
    """The activation is replaced first, and its result is the loss's logits."""
    layer = torch.nn.Linear(WIDTH, 13)

    def function(x):
        y = F.gelu(layer(x))
        loss = F.cross_entropy(y, CLASSES)
        y.view(-1).detach().mul_(2)
        return loss

    x, fusing = normal(6, WIDTH), engine()
    ours, wanted = (step(one, [*layer.parameters()], x) for one in (fusing.fuse(function), function))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert fusing.get_fusion_stats().matches == {"linear_activation": 1}
