"""A Recording in, the same step in more and smaller launches out: what may overlap is only what is apart.

The gradients of a convolution are two kernels behind one operation; what an optimizer or a clipping of gradients does
to a list of tensors needs, for each of them, no other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from kitsune.engine.graph import Launch, LaunchGraph
from kitsune.engine.record import accesses
from kitsune.engine.recording import Call, Place, Recording, spans

Pair = tuple[Launch, Call]

#: Operations over parallel lists: what they do to one tensor is no business of the next one's.
LISTS: Final = ("aten::_fused_adam", "aten::_fused_sgd_", "aten::_foreach_")
CONVOLUTION: Final = "aten::convolution_backward"
MASK: Final = 10  # position of output_mask


def split(recording: Recording, bucket_bytes: int) -> Recording:
    """The results are the same to the bit: every kernel computes what it computed, on the same operands."""
    graph = recording.graph
    pairs = zip(graph.launches, recording.calls, strict=True)
    smaller = [piece for pair in pairs for piece in pieces(pair, bucket_bytes)]
    launches, calls = zip(*smaller, strict=True) if smaller else ((), ())
    return replace(recording, graph=LaunchGraph.of(launches, graph.storages), calls=tuple(calls))


def pieces(pair: Pair, bucket_bytes: int) -> Iterator[Pair]:
    _, call = pair
    name = call.function._schema.name if isinstance(call.function, torch._ops.OpOverload) else ""
    if name == CONVOLUTION and all(call.arguments[MASK][:2]):
        return gradients_apart(pair)
    if name.startswith(LISTS):
        return buckets(pair, bucket_bytes)
    return iter([pair])


def gradients_apart(pair: Pair) -> Iterator[Pair]:
    """convolution_backward once for the input's gradient, and once for those of weight and bias."""
    launch, call = pair
    with_bias = call.arguments[MASK][2]
    for suffix, mask in (("input", (True, False, False)), ("weight", (False, True, with_bias))):
        results = tuple(place if wanted else None for place, wanted in zip(call.results, mask, strict=True))
        arguments = (*call.arguments[:MASK], list(mask), *call.arguments[MASK + 1 :])
        writes = spans(place for place in results if place is not None)
        named = replace(launch, name=f"{launch.name} of {suffix}", writes=writes)
        yield named, replace(call, arguments=arguments, results=results)


def buckets(pair: Pair, bucket_bytes: int) -> Iterator[Pair]:
    """The lists in pieces of neighbouring tensors, each of `bucket_bytes` at least but for the last."""
    launch, call = pair
    results = call.results if any(call.results) else ()
    lists = [value for value in (*call.arguments, *call.named.values(), results) if is_list(value)]
    tensors: Sequence[Place] = next(filter(is_places, lists), ())
    if not tensors or any(len(value) not in (0, len(tensors)) for value in lists):
        yield pair
        return
    for begin, end in ranges(tensors, bucket_bytes):
        arguments = tuple(part(value, begin, end) for value in call.arguments)
        named = {name: part(value, begin, end) for name, value in call.named.items()}
        reads, writes = accesses(call.function, arguments, named)
        made = results[begin:end]
        piece = replace(launch, reads=spans(reads), writes=spans([*writes, *filter(None, made)]))
        fresh = {span.storage for span in piece.writes}
        allocates = tuple(storage for storage in call.allocates if storage in fresh)
        yield piece, replace(call, arguments=arguments, named=named, results=made, allocates=allocates)


def ranges(parameters: Sequence[Place], bucket_bytes: int) -> Iterator[tuple[int, int]]:
    begin, nbytes = 0, 0
    for at, place in enumerate(parameters):
        span = place.span()
        nbytes += span.end - span.begin
        if nbytes >= bucket_bytes or at == len(parameters) - 1:
            yield begin, at + 1
            begin, nbytes = at + 1, 0


def part(value: Any, begin: int, end: int) -> Any:
    return value[begin:end] if is_list(value) else value


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def is_places(value: Any) -> bool:
    return is_list(value) and bool(value) and all(isinstance(item, Place) for item in value)
