"""The Triton kernel of attention, and what it shares with that of the gradients.

A sequence is whole blocks and a smaller one, so that 197 positions are not computed as 256: LAST is the size of the
smaller block where each block is a program's, REST where a program loops over blocks, and 0 where there is none. In
whole blocks nothing is masked. Rows beyond the last position are read as zeros, and add nothing to any gradient.

`steps` are the strides of batch, heads and positions, and `at` is (number of the head in the batch, heads). `factor` is
that of scores as exponents of 2, `lift` that of what the dropout keeps.
"""

from typing import Final

import triton
import triton.language as tl

#: Rounds of Philox: 7 pass BigCrush (Salmon et al. 2011), and cost 30 % less than Triton's 10.
ROUNDS: Final = tl.constexpr(7)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    seed,
    out,
    sums,
    q_steps,
    k_steps,
    v_steps,
    out_steps,
    heads,
    tokens,
    factor,
    threshold,
    lift,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    LAST: tl.constexpr,
    KEYS: tl.constexpr,
    REST: tl.constexpr,
):
    """A block of queries of one head."""
    parts = tl.cdiv(tokens, QUERIES)
    plane, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    given = (q, k, v, out, sums + plane.to(tl.int64) * tokens)
    steps = (q_steps, k_steps, v_steps, out_steps)
    at, factors = (plane, heads), (factor, threshold, lift)
    if LAST == 0 or LAST == QUERIES or part < parts - 1:
        attend(given, steps, at, seed, part * QUERIES, tokens, factors, CAUSAL, HEAD, QUERIES, KEYS, REST)
    else:
        attend(given, steps, at, seed, part * QUERIES, tokens, factors, CAUSAL, HEAD, LAST, KEYS, REST)


@triton.jit
def attend(
    given,
    steps,
    at,
    seed,
    start,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    REST: tl.constexpr,
):
    """Writes the results and sums of QUERIES queries from `start` on."""
    q, k, v, out, sums = given
    query = rows_of(q, steps[0], at, start, tokens, QUERIES, HEAD, True)
    whole = tokens // KEYS * KEYS
    if REST > 0:  # read before the loop, which hides the time that this takes
        rest_key = rows_of(k, steps[1], at, whole, tokens, REST, HEAD, True)
        rest_value = rows_of(v, steps[2], at, whole, tokens, REST, HEAD, True)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, HEAD), tl.float32)
    end = whole
    if CAUSAL:
        end = tl.minimum(whole, start + QUERIES)
    for first in range(0, end, KEYS):
        key = rows_of(k, steps[1], at, first, tokens, KEYS, HEAD, False)
        value = rows_of(v, steps[2], at, first, tokens, KEYS, HEAD, False)
        state = (most, total, result)
        most, total, result = add_keys(
            state, query, key, value, seed, at, start, first, tokens, factors, CAUSAL, QUERIES, KEYS, False
        )
    if REST > 0:
        state = (most, total, result)
        most, total, result = add_keys(
            state, query, rest_key, rest_value, seed, at, start, whole, tokens, factors, CAUSAL, QUERIES, REST, True
        )
    put_rows(out, steps[3], at, start, tokens, result * (factors[2] / total)[:, None], QUERIES, HEAD)
    row = start + tl.arange(0, QUERIES)
    tl.store(sums + row, most + tl.log2(total), mask=row < tokens)


@triton.jit
def add_keys(
    state,
    query,
    key,
    value,
    seed,
    at,
    start,
    first,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The largest exponent, the sum and the result of each query with KEYS keys more, those from `first` on."""
    most, total, result = state
    factor, threshold, _ = factors
    row, column = start + tl.arange(0, QUERIES), first + tl.arange(0, KEYS)
    score = seen(tl.dot(query, tl.trans(key)), row[:, None], column[None, :], tokens, CAUSAL, MASKED)
    higher = tl.maximum(most, tl.max(score, 1) * factor)  # a number: every query sees the first key
    power = tl.exp2(score * factor - higher[:, None])
    decay = tl.exp2(most - higher)
    total = total * decay + tl.sum(power, 1)
    if seed is not None:
        power = tl.where(is_kept(seed, at, row, first, tokens, threshold, QUERIES, KEYS), power, 0.0)
    return higher, total, tl.dot(power.to(value.dtype), value, result * decay[:, None])


@triton.jit
def seen(score, row, column, tokens, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """`score` where the query at `row` sees the key at `column`, else -inf. MASKED: keys may lie beyond the last."""
    if CAUSAL:
        score = tl.where(column <= row, score, float("-inf"))
    if MASKED:
        score = tl.where(column < tokens, score, float("-inf"))
    return score


@triton.jit
def is_kept(seed, at, row, first, tokens, threshold, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(QUERIES, KEYS) from key `first` on. A call of Philox is for four keys of a row, the same four in any tiling."""
    place = row[:, None] * tl.cdiv(tokens, 4) + first // 4 + tl.arange(0, KEYS // 4)[None, :]
    zero = place * 0
    one, two, three, four = tl.philox(tl.load(seed), place, zero + at[0], zero, zero, ROUNDS)
    pairs = tl.join(tl.join(one, two), tl.join(three, four))
    return tl.reshape(pairs.to(tl.int32, bitcast=True) >= threshold, (QUERIES, KEYS))


@triton.jit
def rows_of(x, steps, at, start, tokens, ROWS: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a head from `start` on (ROWS, HEAD). MASKED: some may lie beyond the last, which are zeros."""
    first, offsets = place_of(steps, at, start, ROWS, HEAD)
    if MASKED:
        return tl.load(x + first + offsets, mask=start + tl.arange(0, ROWS)[:, None] < tokens, other=0.0)
    return tl.load(x + first + offsets)


@triton.jit
def put_rows(x, steps, at, start, tokens, value, ROWS: tl.constexpr, HEAD: tl.constexpr):
    first, offsets = place_of(steps, at, start, ROWS, HEAD)
    inside = start + tl.arange(0, ROWS)[:, None] < tokens
    tl.store(x + first + offsets, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def place_of(steps, at, start, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """(offset of the first row, offsets from there, which 32 bits hold: LONGEST_STEP).

    `at`: (number of the head in the batch, heads); `steps`: strides of batch, heads and positions.
    """
    plane, heads = at
    batch, head, token = steps
    first = (
        (plane // heads).to(tl.int64) * batch + (plane % heads).to(tl.int64) * head + tl.cast(start, tl.int64) * token
    )
    return first, tl.arange(0, ROWS)[:, None] * token + tl.arange(0, HEAD)[None, :]
