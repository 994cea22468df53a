"""Masks that a graph builds from constants become flags of the attention; all others stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kitsune.fusion.masks import drop_constant_masks
from kitsune.fusion.operations import operation_of
from tests.unit.kitsune.fusion.fused import stats_of

TOKENS = 8
Q = torch.randn(2, 2, TOKENS, 4)
LOWEST = torch.finfo(torch.float32).min


def places() -> tuple[torch.Tensor, torch.Tensor]:
    """(of queries, of keys), as columns and rows."""
    return torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]


def causal(x: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return keys <= queries


def of_positions(x: torch.Tensor) -> torch.Tensor:
    """As transformers builds it: causal, and within one of the sequences that are packed into a row."""
    positions = torch.arange(TOKENS).unsqueeze(0).expand(2, -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, queries, keys = torch.arange(2)[:, None, None, None], *(one[None, None] for one in places())
    is_shown = queries.new_ones((), dtype=torch.bool) & (keys <= queries)
    return is_shown & (packed[batch, queries] == packed[batch, keys])


def by_vmap(x: torch.Tensor) -> torch.Tensor:
    """As transformers 4 builds it, which adds an offset in place."""
    keys = torch.arange(TOKENS)
    keys += 0
    levels = torch.vmap(lambda query, key: key <= query, in_dims=(None, 0))
    return torch.vmap(levels, in_dims=(0, None))(torch.arange(TOKENS), keys)


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.full((TOKENS, TOKENS), LOWEST).triu(1)[None, None].expand(2, 1, -1, -1)


def of_ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool)


def window(x: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return (keys <= queries) & (keys > queries - 3)


def of_the_input(x: torch.Tensor) -> torch.Tensor:
    return causal(x) & (x[0, 0, :, 0] > -9)[None, :]


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(TOKENS, TOKENS) >= 0


def written(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask[:, 0] = x[0, 0, 0, 0] > 9
    mask[0, 0] = True
    return mask


def by_vmap_of_the_input(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: (row > -9) & causal(x)[0])(x[0, 0, :, 0])[:, :TOKENS]


def written_by_the_input(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(TOKENS)
    places += (x[0, 0, :, 0] > 9).long()
    return torch.arange(TOKENS)[None, :] <= places[:, None]


def of_bias(x: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return torch.where(keys <= queries, 0.0, -1.0)


def written_in_vmap(x: torch.Tensor) -> torch.Tensor:
    mask, keys = torch.ones(TOKENS, TOKENS, dtype=torch.bool), torch.arange(TOKENS)
    torch.vmap(lambda row, query: row.logical_and_(keys <= query))(mask, torch.arange(TOKENS))
    return mask


def written_by_numpy(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask.numpy()[0, 1:] = False
    return mask


@torch._dynamo.nonstrict_trace
def hide_first(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 0] = False
    mask[0, 0] = True
    return mask.sum()


def written_out_of_sight(x: torch.Tensor) -> torch.Tensor:
    mask = causal(x)
    return mask & (hide_first(mask) > -1)


def rounded_by_autocast(x: torch.Tensor) -> torch.Tensor:
    """Of bf16 numbers some are equal, so that the mask shows more."""
    with torch.autocast("cpu", torch.bfloat16):
        places = torch.mm(257 * torch.ones(TOKENS, TOKENS).tril(), torch.ones(TOKENS, 1)).float()
    return places >= places.T


DROPPED = {
    "causal": causal,
    "of positions": of_positions,
    "by vmap": by_vmap,
    "of numbers": of_numbers,
    "of ones": of_ones,
}
KEPT = {"window": window, "of the input": of_the_input, "drawn": drawn, "written": written, "of bias": of_bias}
KEPT |= {
    "written in vmap": written_in_vmap,
    "written by numpy": written_by_numpy,
    "written out of sight": written_out_of_sight,
    "rounded by autocast": rounded_by_autocast,
}
KEPT |= {"by vmap of the input": by_vmap_of_the_input, "written by the input": written_by_the_input}


def attended(mask_of: Callable[[torch.Tensor], torch.Tensor], keys: int = TOKENS, **given: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        mask = mask_of(x)[..., :keys]
        return F.scaled_dot_product_attention(x, x[..., :keys, :] * 2, x[..., :keys, :], attn_mask=mask, **given)

    return run


def dropped(function: Callable[..., Any]) -> tuple[Any, int, list[torch.fx.Node]]:
    """(the result without masks, of how many attentions one was removed, the nodes that are left)."""
    torch._dynamo.reset()
    counts, left = [], []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        counts.append(drop_constant_masks(graph))
        left.extend(graph.graph.nodes)
        graph.graph.lint()
        return graph

    result = torch.compile(function, backend=backend, dynamic=False)(Q)
    return result, sum(counts), left


@pytest.mark.parametrize("name", DROPPED)
def test_a_mask_of_constants_becomes_a_flag(name):
    function = attended(DROPPED[name], scale=0.3)
    result, count, left = dropped(function)
    assert count == 1
    torch.testing.assert_close(result, function(Q))
    (attention,) = (node for node in left if operation_of(node).name == "attention")
    assert "attn_mask" not in attention.kwargs and len(attention.args) == 3
    assert (attention.kwargs["is_causal"], attention.kwargs["scale"]) == (name != "of ones", 0.3)
    assert name == "by vmap" or not any("arange" in node.name for node in left)


@pytest.mark.parametrize("name", KEPT)
def test_any_other_mask_stays(name):
    function = attended(KEPT[name])
    torch.manual_seed(0)
    result, count, _ = dropped(function)
    assert count == 0
    torch.manual_seed(0)
    torch.testing.assert_close(result, function(Q))


def test_a_mask_over_fewer_keys_stays():
    function = attended(causal, keys=5)
    result, count, _ = dropped(function)
    assert count == 0
    torch.testing.assert_close(result, function(Q))


def test_a_mask_of_two_attentions_is_read_once_and_stays_where_something_else_reads_it():
    def run(x):
        mask = causal(x)
        once = F.scaled_dot_product_attention(x, x, x, mask)
        return F.scaled_dot_product_attention(once, x, x, mask) + mask.sum()

    result, count, left = dropped(run)
    assert count == 2
    torch.testing.assert_close(result, run(Q))
    assert any("arange" in node.name for node in left)


def test_without_its_mask_an_attention_is_fused():
    assert stats_of(attended(of_positions), torch.randn(2, 2, TOKENS, 16)).matches == {"attention": 1}


CALLS = []


@torch.library.custom_op("kitsune_test::window", mutates_args=())
def windowed(tokens: int) -> torch.Tensor:
    """Another mask at its second call."""
    CALLS.append(tokens)
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-3 if len(CALLS) > 1 else -tokens)


@windowed.register_fake
def _(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool)


def test_an_operator_of_the_users_own_is_called_in_every_step():
    CALLS.clear()
    torch._dynamo.reset()
    _, count, _ = dropped(attended(lambda x: torch.ops.kitsune_test.window(TOKENS)))
    assert (count, len(CALLS)) == (0, 1)


def test_what_nothing_reads_but_has_an_effect_stays():
    stat = torch.zeros(TOKENS)

    def run(x):
        torch.cumsum(x[0, 0, :, 0], 0, out=stat)
        torch.ops.aten._assert_async.msg(x.sum() < 1e9, "too large")
        return F.scaled_dot_product_attention(x, x, x, causal(x)) + stat[:, None]

    result, count, left = dropped(run)
    assert count == 1
    torch.testing.assert_close(result, run(Q))
    assert stat.any() and any("_assert_async" in str(node.target) for node in left)


def test_beside_levels_that_are_not_known_a_mask_stays():
    def run(x):
        mask = by_vmap(x)[None, None]
        return F.scaled_dot_product_attention(torch.vmap(lambda row: row * 2)(x), x, x, mask)

    torch._dynamo.reset()
    counts, x = [], Q.clone()
    torch._dynamo.mark_dynamic(x, 0)

    def backend(graph, _):
        counts.append(drop_constant_masks(graph))
        return graph

    torch.testing.assert_close(torch.compile(run, backend=backend)(x), run(Q))
    assert len(counts) == 1


def test_within_the_gradient_of_a_function_a_mask_stays_right():
    def run(x):
        return torch.func.grad(lambda y: F.scaled_dot_product_attention(y, x, x, by_vmap(x)[None, None]).sum())(x)

    result, _, _ = dropped(run)
    torch.testing.assert_close(result, run(Q))
