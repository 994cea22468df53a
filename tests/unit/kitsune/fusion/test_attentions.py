"""Whether attention is over the parts of one projection, or of three of one input, by the memory they lie in."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kitsune.fusion import Match, benefit, calls
from kitsune.fusion.attentions import attention, multi_head_attention, projected_attention
from tests.unit.kitsune.fusion.fused import engine, stats_of

HEADS, HEAD, TOKENS = 2, 16, 5
WIDTH = HEADS * HEAD
MAY_DEPEND = "may depend on the strides of a result"


def heads_of(part):
    return part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def chunks(x):
    return map(heads_of, x.chunk(3, -1))


def pieces(x):
    return (part.view(*part.shape[:2], HEADS, HEAD).transpose(1, 2) for part in x.split(WIDTH, dim=2))


def permuted(x):
    return x.reshape(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)


def slices(x):
    return (heads_of(x[..., at * WIDTH : (at + 1) * WIDTH]) for at in range(3))


def turned(x):
    k, q, v = chunks(x)
    return q, k, v


def scaled(x):
    q, k, v = chunks(x)
    return q * 2, k, v


def heads_first(x):
    """Query, key and value of a head beside each other, as in GPT-NeoX."""
    return x.unflatten(-1, (HEADS, 3, HEAD)).transpose(1, 2).unbind(3)


def part_of_more(x):
    return map(heads_of, torch.cat((x, x), -1).chunk(6, -1)[:3])


def apart(x):
    return (heads_of(part + 1) for part in x.chunk(3, -1))


def detached(x):
    q, k, v = chunks(x)
    return q, k.detach(), v


def apart_from_gradients(x):
    with torch.no_grad():
        return tuple(chunks(x))


def scaled_gradients(x):
    q, k, v = chunks(x)
    return q, Scaled.apply(k), v


def recomputed(x):
    return map(heads_of, checkpoint(lambda whole: whole.chunk(3, -1), x, use_reentrant=False))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return gradient * 0.5


def found(function):
    """(the match, the node that the projection is computed by)."""
    matches, projections = [], []

    def look(graph, _):
        for node in graph.graph.nodes:
            matches.extend(filter(None, [attention(node)]))
            projections.extend([node] if node.target is F.linear else [])
        return graph

    torch._dynamo.reset()
    x, weight = torch.randn(2, TOKENS, WIDTH), torch.randn(3 * WIDTH, WIDTH)
    torch.compile(function, backend=look, fullgraph=True)(x.requires_grad_(), weight.requires_grad_())
    (match,), (projection,) = matches, projections
    assert isinstance(match, Match)
    return match, projection


@pytest.mark.parametrize("views", [chunks, pieces, permuted, slices])
def test_parts_of_one_projection_are_read_as_one(views):
    match, projection = found(lambda x, weight: F.scaled_dot_product_attention(*views(F.linear(x, weight))))
    assert match.call is calls.packed_attention
    assert match.arguments[:2] == (projection, (2, HEADS, TOKENS, HEAD))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of a Function of the user's
@pytest.mark.parametrize(
    "views",
    [
        turned,
        scaled,
        heads_first,
        part_of_more,
        apart,
        detached,
        apart_from_gradients,
        scaled_gradients,
        recomputed,
    ],
)
def test_others_are_read_each_by_itself(views):
    match, _ = found(lambda x, weight: F.scaled_dot_product_attention(*views(F.linear(x, weight))))
    assert match.call is calls.attention


def test_the_call_computes_what_the_parts_do():
    packed = torch.randn(2, TOKENS, 3 * WIDTH)
    wanted = F.scaled_dot_product_attention(*chunks(packed), is_causal=True)
    ours = calls.packed_attention(packed, (2, HEADS, TOKENS, HEAD), None, True, 0.0, torch.float32)
    torch.testing.assert_close(ours, wanted)


# Of three projections -------------------------------------------------------------------------------------------------


def projected(function, inputs=1, shape=(2, TOKENS, WIDTH)):
    """(what is found, the nodes of the linear layers)."""
    finds, layers = [], []

    def look(graph, _):
        for node in graph.graph.nodes:
            finds.append(projected_attention(node))
            layers.extend([node] if node.target is F.linear else [])
        return graph

    torch._dynamo.reset()
    xs = [torch.randn(shape).requires_grad_() for _ in range(inputs)]
    weights = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(3)]
    torch.compile(function, backend=look, fullgraph=True)(*xs, *weights)
    (find,) = [one for one in finds if one is not None] or [None]
    return find, layers


def attended(q, k, v, heads=heads_of, **settings):
    return F.scaled_dot_product_attention(*map(heads, (q, k, v)), **settings)


def test_three_projections_of_one_input_become_one():
    match, layers = projected(lambda x, *weights: attended(*(F.linear(x, each) for each in weights)))
    assert match.call is calls.projected_attention
    assert match.arguments[0].name == "l_x_" and len(layers) == 3 and set(layers) < set(match.inner)
    assert match.arguments[4:8] == (None, None, None, (2, HEADS, TOKENS, HEAD))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y, a, b, c: attended(F.linear(x, a), F.linear(y, b), F.linear(y, c)), 2),
        (lambda x, a, b, c: attended(F.linear(x, a), F.linear(x, b), F.linear(x, b)), 1),
        (lambda x, a, b, c: attended(F.linear(x, a), F.linear(x, b), F.linear(x, c) * 2), 1),
        (lambda x, a, b, c: attended(F.linear(x, a), F.linear(x, b).detach(), F.linear(x, c)), 1),
        (lambda x, a, b, c: attended(F.linear(x, a), x, F.linear(x, c)), 1),
    ],
    ids=["of two inputs", "one weight twice", "one is scaled", "one is detached", "keys are not projected"],
)
def test_other_projections_stay_apart(function, inputs):
    assert projected(function, inputs)[0] is None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x, a, b, c: attended(F.linear(x, a, a[0]), F.linear(x, b), F.linear(x, c)),
            "only some of its projections have biases",
        ),
        (
            lambda x, a, b, c: attended(
                *(F.linear(x, each) for each in (a, b, c)), heads=lambda one: one.view(2, HEADS, TOKENS, HEAD)
            ),
            "its projections are not split into heads in their order",
        ),
    ],
    ids=["one bias", "positions for heads"],
)
def test_near_misses_say_why(function, reason):
    assert projected(function)[0] == reason


@pytest.mark.parametrize("biases", [False, True])
def test_the_joined_call_computes_what_the_three_do(biases):
    torch.manual_seed(0)
    x, *weights = torch.randn(2, TOKENS, 7), *(torch.randn(WIDTH, 7) for _ in range(3))
    given = [torch.randn(WIDTH) if biases else None for _ in range(3)]
    wanted = attended(*map(F.linear, [x] * 3, weights, given), is_causal=True)
    shape = (2, HEADS, TOKENS, HEAD)
    ours = calls.projected_attention(x, *weights, *given, shape, None, True, 0.0, torch.float32)
    torch.testing.assert_close(ours, wanted)


# torch's own layer ----------------------------------------------------------------------------------------------------


def own(change=None, keys=None, **given):
    """What is found in a model with `nn.MultiheadAttention`, called with `given`."""
    finds = []

    def look(graph, _):
        finds.extend(filter(None, map(multi_head_attention, graph.graph.nodes)))
        return graph

    torch._dynamo.reset()
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **(change or {}))
    x, other = torch.randn(2, TOKENS, WIDTH), torch.randn(2, TOKENS, WIDTH)

    def model(x, other):
        return layer(x, *keys(x, other), **{"need_weights": False, **given})[0] + 1

    torch.compile(model, backend=look, fullgraph=True)(x, other)
    (find,) = finds
    return find


def its_own(x, _):
    return x, x


def test_torchs_own_layer_is_one_call():
    match = own(keys=its_own)
    assert match.call is calls.multi_head_attention
    assert match.arguments[-4:] == (HEADS, False, 0.0, torch.float32)


@pytest.mark.parametrize(
    ("change", "keys", "given", "reason"),
    [
        ({}, lambda x, other: (other, other), {}, "it is not over one batch of its own input"),
        ({}, its_own, {"need_weights": True}, "it is asked for its weights"),
        ({}, its_own, {"attn_mask": torch.zeros(TOKENS, TOKENS, dtype=torch.bool)}, "it has a mask"),
        ({}, its_own, {"key_padding_mask": torch.zeros(2, TOKENS, dtype=torch.bool)}, "it has a mask"),
        ({"add_bias_kv": True}, its_own, {}, "it has projections of other sizes, or keys of its own"),
        ({"add_zero_attn": True}, its_own, {}, "it has projections of other sizes, or keys of its own"),
        (
            {"kdim": WIDTH // 2, "vdim": WIDTH},
            lambda x, _: (x[..., ::2], x),
            {},
            "it is not over one batch of its own input",
        ),
    ],
    ids=["other keys", "weights", "a mask", "padding", "keys of its own", "a zero", "other sizes"],
)
def test_of_torchs_own_layer_what_is_more_is_torchs(change, keys, given, reason):
    assert own(change, keys, **given) == reason


LAYER = torch.nn.MultiheadAttention(WIDTH, HEADS)
LAYER_FIRST = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


def mixed(x, layer=LAYER):
    return layer(x, x, x, need_weights=False)[0]


def written_copy(x):
    y = mixed(x, LAYER_FIRST)
    z = y.contiguous()
    z += x
    return F.relu(z) * y


def copied_without_gradients(x):
    y = mixed(x, LAYER_FIRST)
    with torch.no_grad():
        copy = y.contiguous()
    return (y.relu() - copy * 2).sin()


def of_given_keys(x):
    keys = torch.ones(x.shape[1] * HEADS, x.shape[0], HEAD)
    given = LAYER.in_proj_weight, LAYER.in_proj_bias, None, None, False, 0.0, LAYER.out_proj.weight, LAYER.out_proj.bias
    own = {"need_weights": False, "static_k": keys, "static_v": 2 * keys}
    return F.multi_head_attention_forward(x, x, x, WIDTH, HEADS, *given, **own)[0].relu()


@pytest.mark.parametrize(
    "after",
    [lambda x, y: x - y, lambda x, y: torch.stack((x, y)).sin(), lambda x, y: torch.bmm(y, y.transpose(1, 2)).sin()],
    ids=["subtracted", "stacked", "multiplied"],
)
def test_torchs_own_layer_is_one_call_before(after):
    stats = stats_of(lambda x: after(x, mixed(x, LAYER_FIRST)), torch.randn(2, TOKENS, WIDTH))
    assert stats.matches == {"multi_head_attention": 1}


@pytest.mark.parametrize(
    "function",
    [
        *(written_copy, copied_without_gradients, of_given_keys),
        lambda x: (mixed(x) + x).view(-1, WIDTH),
        lambda x: mixed(x) + x,
        lambda x: F.dropout(mixed(x, LAYER_FIRST), 0.1, False).sin(),
        lambda x: x + F.dropout(mixed(x, LAYER_FIRST), 0.1, False),
    ],
    ids=["a copy is written", "without gradients", "keys", "a view", "strides", "they leave", "dropout of nothing"],
)
def test_whatever_follows_torchs_own_layer_it_computes_the_same(function):
    x = torch.randn(2, TOKENS, WIDTH)
    found = []
    for run in (engine().fuse(function), function):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        found.append(
            (y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *LAYER.parameters()], allow_unused=True))
        )
    assert found[0][0].stride() == found[1][0].stride()
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def written_through_a_view(y):
    y.reshape(-1).mul_(2)
    return y


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda y: y, "a result leaves the graph"),
        (lambda y: y.view(-1, WIDTH).sin(), "a view needs the strides"),
        (lambda y: y.mul_(2).sin(), MAY_DEPEND),
        (written_through_a_view, MAY_DEPEND),
        (lambda y: y.as_strided(y.shape, (y.stride(0), WIDTH, 1)).sin(), MAY_DEPEND),
        (lambda y: checkpoint(lambda one: one.view(-1).sin(), y, use_reentrant=False), MAY_DEPEND),
    ],
    ids=["it leaves", "a view of rows", "in place", "through a view", "strides in the graph", "recomputed"],
)
def test_torchs_own_layer_stays_where_its_strides_may_show(after, reason):
    fusing = engine()
    fusing.fuse(lambda x: after(mixed(x)))(torch.randn(2, TOKENS, WIDTH))
    stats = fusing.get_fusion_stats()
    assert not stats.matches
    assert [one.reason for one in stats.refused if reason in one.reason]


def test_what_follows_torchs_own_layer_is_measured_with_gradients(monkeypatch):
    known = []
    monkeypatch.setattr(benefit, "sample_of", lambda value, of=benefit.sample_of: known.append(value) or of(value))
    fusing = engine()
    fusing.fuse(lambda x: F.silu(x.sin()) * mixed(x))(torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    assert fusing.get_fusion_stats().matches == {"multi_head_attention": 1, "swiglu": 1}
    assert all(value.requires_grad for value in known)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_it_is_found_in_torchs_encoder_layer(mode):
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)
    fusing = engine()
    fusing.fuse(getattr(layer, mode)())(torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    assert fusing.get_fusion_stats().matches.get("multi_head_attention") == 1
