"""The Triton kernel of the gradients of attention; names as in attention_kernels.py.

A program for keys holds their gradients and loops over the queries, one for queries the reverse. They compute the same
scores: seven products, where five suffice if a program has all keys of a head. Then no others are for queries.
"""

import triton
import triton.language as tl

from kitsune.kernels.attention_kernels import is_kept, put_rows, rows_of, seen


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
    KEYS: tl.constexpr,
    LAST_KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    LAST_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
):
    """A block of keys or a block of queries of one head: the first of its programs are for keys."""
    plane, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    given = (q, k, v, out, dout, sums + plane.to(tl.int64) * tokens)
    steps = (q_steps, k_steps, v_steps, out_steps, dout_steps)
    at, factors = (plane, heads), (scale * lift, factor, threshold, lift)
    parts = tl.cdiv(tokens, KEYS)
    first, start = part * KEYS, (part - parts) * ROWS
    key_call = (given, steps, (dq, dk, dv), (dq_steps, dk_steps, dv_steps), at, seed, first, tokens, factors)
    query_call = (given, steps, dq, dq_steps, at, seed, start, tokens, factors)
    if ROWS == 0 or part < parts:
        if LAST_KEYS == 0 or LAST_KEYS == KEYS:
            key_gradients(*key_call, CAUSAL, HEAD, KEYS, QUERIES, REST, ROWS == 0, LAST_KEYS > 0)
        elif part < parts - 1:
            key_gradients(*key_call, CAUSAL, HEAD, KEYS, QUERIES, REST, ROWS == 0, False)
        else:
            key_gradients(*key_call, CAUSAL, HEAD, LAST_KEYS, QUERIES, REST, ROWS == 0, True)
    elif LAST_ROWS == 0 or LAST_ROWS == ROWS or start + ROWS <= tokens:
        query_gradients(*query_call, CAUSAL, HEAD, ROWS, COLUMNS, REST_COLUMNS)
    else:
        query_gradients(*query_call, CAUSAL, HEAD, LAST_ROWS, COLUMNS, REST_COLUMNS)


@triton.jit
def key_gradients(
    given,
    steps,
    to,
    to_steps,
    at,
    seed,
    first,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes the gradients of KEYS keys and values from `first` on. WHOLE: those of the queries as well."""
    key = rows_of(given[1], steps[1], at, first, tokens, KEYS, HEAD, MASKED)
    value = rows_of(given[2], steps[2], at, first, tokens, KEYS, HEAD, MASKED)
    whole = tokens // QUERIES * QUERIES
    if REST > 0:  # read before the loop, which hides the time that this takes
        rest = queries_of(given, steps, at, whole, tokens, factors, REST, HEAD, True)
    dkey = tl.zeros((KEYS, HEAD), tl.float32)
    dvalue = tl.zeros((KEYS, HEAD), tl.float32)
    begin = 0
    if CAUSAL:
        begin = first // QUERIES * QUERIES
    for start in range(begin, whole, QUERIES):
        block = queries_of(given, steps, at, start, tokens, factors, QUERIES, HEAD, False)
        dkey, dvalue, dquery = add_queries(
            dkey,
            dvalue,
            key,
            value,
            block,
            seed,
            at,
            start,
            first,
            tokens,
            factors,
            CAUSAL,
            QUERIES,
            KEYS,
            WHOLE,
            MASKED,
        )
        if WHOLE:
            put_rows(to[0], to_steps[0], at, start, tokens, tl.trans(dquery) * factors[0], QUERIES, HEAD)
    if REST > 0:
        dkey, dvalue, dquery = add_queries(
            dkey, dvalue, key, value, rest, seed, at, whole, first, tokens, factors, CAUSAL, REST, KEYS, WHOLE, MASKED
        )
        if WHOLE:
            put_rows(to[0], to_steps[0], at, whole, tokens, tl.trans(dquery) * factors[0], REST, HEAD)
    put_rows(to[1], to_steps[1], at, first, tokens, dkey * factors[0], KEYS, HEAD)
    put_rows(to[2], to_steps[2], at, first, tokens, dvalue * factors[3], KEYS, HEAD)


@triton.jit
def add_queries(
    dkey,
    dvalue,
    key,
    value,
    block,
    seed,
    at,
    start,
    first,
    tokens,
    factors,
    CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradients of keys and of values with those by QUERIES queries more; for WHOLE that of these, transposed.

    All are without their factors.
    """
    query, slope, mean, log_sum = block
    _, factor, threshold, _ = factors
    row, column = start + tl.arange(0, QUERIES), first + tl.arange(0, KEYS)
    exponent = tl.dot(key, tl.trans(query)) * factor - log_sum[None, :]
    power = tl.exp2(seen(exponent, row[None, :], column[:, None], tokens, CAUSAL, MASKED))
    dpower = tl.dot(value, tl.trans(slope))
    dropped = power
    if seed is not None:
        kept = tl.trans(is_kept(seed, at, row, first, tokens, threshold, QUERIES, KEYS))
        dropped, dpower = tl.where(kept, power, 0.0), tl.where(kept, dpower, 0.0)
    dvalue = tl.dot(dropped.to(slope.dtype), slope, dvalue)
    dscore = (power * (dpower - mean[None, :])).to(query.dtype)
    dkey = tl.dot(dscore, query, dkey)
    dquery = dkey
    if WHOLE:
        dquery = tl.dot(tl.trans(key), dscore)
    return dkey, dvalue, dquery


@triton.jit
def query_gradients(
    given,
    steps,
    dq,
    dq_steps,
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
    """Writes the gradients of QUERIES queries from `start` on."""
    k, v = given[1], given[2]
    block = queries_of(given, steps, at, start, tokens, factors, QUERIES, HEAD, True)
    whole = tokens // KEYS * KEYS
    if REST > 0:
        rest_key = rows_of(k, steps[1], at, whole, tokens, REST, HEAD, True)
        rest_value = rows_of(v, steps[2], at, whole, tokens, REST, HEAD, True)
    dquery = tl.zeros((QUERIES, HEAD), tl.float32)
    end = whole
    if CAUSAL:
        end = tl.minimum(whole, start + QUERIES)
    for first in range(0, end, KEYS):
        key = rows_of(k, steps[1], at, first, tokens, KEYS, HEAD, False)
        value = rows_of(v, steps[2], at, first, tokens, KEYS, HEAD, False)
        dquery = add_slopes(
            dquery, block, key, value, seed, at, start, first, tokens, factors, CAUSAL, QUERIES, KEYS, False
        )
    if REST > 0:
        dquery = add_slopes(
            dquery, block, rest_key, rest_value, seed, at, start, whole, tokens, factors, CAUSAL, QUERIES, REST, True
        )
    put_rows(dq, dq_steps, at, start, tokens, dquery * factors[0], QUERIES, HEAD)


@triton.jit
def add_slopes(
    dquery,
    block,
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
    """The gradient of QUERIES queries, without its factor, with that by KEYS keys more."""
    query, slope, mean, log_sum = block
    _, factor, threshold, _ = factors
    row, column = start + tl.arange(0, QUERIES), first + tl.arange(0, KEYS)
    exponent = tl.dot(query, tl.trans(key)) * factor - log_sum[:, None]
    power = tl.exp2(seen(exponent, row[:, None], column[None, :], tokens, CAUSAL, MASKED))
    dpower = tl.dot(slope, tl.trans(value))
    if seed is not None:
        dpower = tl.where(is_kept(seed, at, row, first, tokens, threshold, QUERIES, KEYS), dpower, 0.0)
    dscore = (power * (dpower - mean[:, None])).to(key.dtype)
    return tl.dot(dscore, key, dquery)


@triton.jit
def queries_of(
    given, steps, at, start, tokens, factors, QUERIES: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr
):
    """(queries, gradients of the results, what each row of theirs has in common without `lift`, the forward's sums)."""
    q, _, _, out, dout, sums = given
    query = rows_of(q, steps[0], at, start, tokens, QUERIES, HEAD, MASKED)
    slope = rows_of(dout, steps[4], at, start, tokens, QUERIES, HEAD, MASKED)
    result = rows_of(out, steps[3], at, start, tokens, QUERIES, HEAD, MASKED)
    row = start + tl.arange(0, QUERIES)
    log_sum = tl.load(sums + row, mask=row < tokens, other=0.0)
    mean = tl.sum(slope.to(tl.float32) * result.to(tl.float32), 1) / factors[3]
    return query, slope, mean, log_sum
