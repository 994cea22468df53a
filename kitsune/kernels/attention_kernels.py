"""The Triton kernels of attention over short sequences.

`steps` are the strides of batch, heads and positions, and `at` is (number of the head in the batch, heads). `factor` is
that of scores as exponents of 2, `lift` that of what the dropout keeps. Rows beyond the last position are zeros where
they are read, and so add nothing to the gradients of keys and values.
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
    KEYS: tl.constexpr,
):
    """A block of queries of one head. `factor`: that of the scores, for powers of 2; `lift`: that of what is kept."""
    parts = tl.cdiv(tokens, QUERIES)
    plane, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    at = (plane, heads)
    row = part * QUERIES + tl.arange(0, QUERIES)
    query = rows_of(q, q_steps, at, part * QUERIES, tokens, QUERIES, HEAD)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, HEAD), tl.float32)
    end = tokens
    if CAUSAL:
        end = tl.minimum(tokens, (part + 1) * QUERIES)
    for start in range(0, end, KEYS):
        column = start + tl.arange(0, KEYS)
        key = rows_of(k, k_steps, at, start, tokens, KEYS, HEAD)
        value = rows_of(v, v_steps, at, start, tokens, KEYS, HEAD)
        score = tl.dot(query, tl.trans(key))
        score = tl.where(is_seen(row[:, None], column[None, :], tokens, CAUSAL), score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1) * factor)  # a number: every row sees its first key
        power = tl.exp2(score * factor - higher[:, None])
        decay = tl.exp2(most - higher)
        total = total * decay + tl.sum(power, 1)
        if seed is not None:
            power = tl.where(is_kept(seed, plane, row, start, tokens, threshold, KEYS), power, 0.0)
        result = tl.dot(power.to(value.dtype), value, result * decay[:, None])
        most = higher
    put_rows(out, out_steps, at, part * QUERIES, tokens, result * (lift / total)[:, None], QUERIES, HEAD)
    tl.store(sums + plane.to(tl.int64) * tokens + row, most + tl.log2(total), mask=row < tokens)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    seed,
    out,
    dout,
    sums,
    dq,
    dk,
    dv,
    q_steps,
    k_steps,
    v_steps,
    out_steps,
    dout_steps,
    dq_steps,
    dk_steps,
    dv_steps,
    heads,
    tokens,
    programs,
    scale,
    factor,
    threshold,
    lift,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of keys or a block of queries of one head: the first of its programs are for keys."""
    plane, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    at, parts = (plane, heads), tl.cdiv(tokens, KEYS)
    given = (q, k, v, out, dout, sums + plane.to(tl.int64) * tokens)
    steps = (q_steps, k_steps, v_steps, out_steps, dout_steps)
    factors = (scale * lift, factor, threshold, lift)
    if ROWS == 0 or part < parts:
        dkey, dvalue = key_gradients(
            given, steps, at, dq, dq_steps, seed, part, tokens, factors, CAUSAL, HEAD, QUERIES, KEYS, ROWS == 0
        )
        put_rows(dk, dk_steps, at, part * KEYS, tokens, dkey * (scale * lift), KEYS, HEAD)
        put_rows(dv, dv_steps, at, part * KEYS, tokens, dvalue * lift, KEYS, HEAD)
    else:
        dquery = query_gradients(given, steps, at, seed, part - parts, tokens, factors, CAUSAL, HEAD, ROWS, COLUMNS)
        put_rows(dq, dq_steps, at, (part - parts) * ROWS, tokens, dquery * (scale * lift), ROWS, HEAD)


@triton.jit
def key_gradients(
    given,
    steps,
    at,
    dq,
    dq_steps,
    seed,
    part,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The gradients of a block of keys and values, up to their factors. WHOLE: writes those of the queries as well."""
    q, k, v, out, dout, sums = given
    late, factor, threshold, lift = factors
    column = part * KEYS + tl.arange(0, KEYS)
    key = rows_of(k, steps[1], at, part * KEYS, tokens, KEYS, HEAD)
    value = rows_of(v, steps[2], at, part * KEYS, tokens, KEYS, HEAD)
    dkey = tl.zeros((KEYS, HEAD), tl.float32)
    dvalue = tl.zeros((KEYS, HEAD), tl.float32)
    first = 0
    if CAUSAL:
        first = part * KEYS // QUERIES * QUERIES
    for start in range(first, tokens, QUERIES):
        row = start + tl.arange(0, QUERIES)
        query = rows_of(q, steps[0], at, start, tokens, QUERIES, HEAD)
        slope = rows_of(dout, steps[4], at, start, tokens, QUERIES, HEAD)
        mean = mean_of(slope, rows_of(out, steps[3], at, start, tokens, QUERIES, HEAD), lift)
        log_sum = tl.load(sums + row, mask=row < tokens, other=0.0)
        exponent = tl.dot(key, tl.trans(query)) * factor - log_sum[None, :]
        power = tl.exp2(tl.where(is_seen(row[None, :], column[:, None], tokens, CAUSAL), exponent, float("-inf")))
        dpower = tl.dot(value, tl.trans(slope))
        dropped = power
        if seed is not None:
            kept = tl.trans(is_kept(seed, at[0], row, part * KEYS, tokens, threshold, KEYS))
            dropped, dpower = tl.where(kept, power, 0.0), tl.where(kept, dpower, 0.0)
        dvalue = tl.dot(dropped.to(slope.dtype), slope, dvalue)
        dscore = (power * (dpower - mean[None, :])).to(query.dtype)
        dkey = tl.dot(dscore, query, dkey)
        if WHOLE:
            dquery = tl.trans(tl.dot(tl.trans(key), dscore))
            put_rows(dq, dq_steps, at, start, tokens, dquery * late, QUERIES, HEAD)
    return dkey, dvalue


@triton.jit
def query_gradients(
    given,
    steps,
    at,
    seed,
    part,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of a block of queries, up to its factor."""
    q, k, v, out, dout, sums = given
    _, factor, threshold, lift = factors
    row = part * ROWS + tl.arange(0, ROWS)
    query = rows_of(q, steps[0], at, part * ROWS, tokens, ROWS, HEAD)
    slope = rows_of(dout, steps[4], at, part * ROWS, tokens, ROWS, HEAD)
    mean = mean_of(slope, rows_of(out, steps[3], at, part * ROWS, tokens, ROWS, HEAD), lift)
    log_sum = tl.load(sums + row, mask=row < tokens, other=0.0)
    dquery = tl.zeros((ROWS, HEAD), tl.float32)
    end = tokens
    if CAUSAL:
        end = tl.minimum(tokens, (part + 1) * ROWS)
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        key = rows_of(k, steps[1], at, start, tokens, COLUMNS, HEAD)
        value = rows_of(v, steps[2], at, start, tokens, COLUMNS, HEAD)
        exponent = tl.dot(query, tl.trans(key)) * factor - log_sum[:, None]
        power = tl.exp2(tl.where(is_seen(row[:, None], column[None, :], tokens, CAUSAL), exponent, float("-inf")))
        dpower = tl.dot(slope, tl.trans(value))
        if seed is not None:
            dpower = tl.where(is_kept(seed, at[0], row, start, tokens, threshold, COLUMNS), dpower, 0.0)
        dscore = (power * (dpower - mean[:, None])).to(key.dtype)
        dquery = tl.dot(dscore, key, dquery)
    return dquery


@triton.jit
def mean_of(slope, result, lift):
    """What each row's gradients of its softmax have in common, without the factor of what is kept."""
    return tl.sum(slope.to(tl.float32) * result.to(tl.float32), 1) / lift


@triton.jit
def is_seen(row, column, tokens, CAUSAL: tl.constexpr):
    inside = column < tokens
    if CAUSAL:
        inside = inside & (column <= row)
    return inside


@triton.jit
def is_kept(seed, plane, row, start, tokens, threshold, KEYS: tl.constexpr):
    """(rows, KEYS) from key `start` on. A call of Philox is for four keys of a row, the same four in any tiling."""
    place = row[:, None] * tl.cdiv(tokens, 4) + start // 4 + tl.arange(0, KEYS // 4)[None, :]
    zero = place * 0
    first, second, third, fourth = tl.philox(tl.load(seed), place, zero + plane, zero, zero, ROUNDS)
    pairs = tl.join(tl.join(first, second), tl.join(third, fourth))
    return tl.reshape(pairs.to(tl.int32, bitcast=True) >= threshold, (row.shape[0], KEYS))


@triton.jit
def rows_of(x, steps, at, start, tokens, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Rows of a head from `start` on (ROWS, HEAD), zeros beyond the last."""
    first, offsets = place_of(steps, at, start, ROWS, HEAD)
    return tl.load(x + first + offsets, mask=start + tl.arange(0, ROWS)[:, None] < tokens, other=0.0)


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
