"""Splits launches whose parts are independent, so that the parts can run side by side.

The gradients of a convolution are two kernels behind one operation. An optimizer's update, or a clipping of gradients,
handles each tensor of a list on its own. So the update of the last layers can begin during the backward, and after it
only the update of the first layers is left. The bucket of these is small: on an H200 a fused AdamW takes 38 us for the
61 706 parameters of LeNet, a sixth of the step, because a single block of threads handles up to 65 536 elements.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final

import torch

from kitsune.kernels.layouts import has_no_gaps
from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, is_filled
from kitsune.launches.model.recording import Call, Recording, TensorView, is_place, places_of, spans
from kitsune.launches.recording.recorder import accesses

Pair = tuple[Launch, Call]

#: Operations over parallel lists of tensors that handle each entry on its own.
LISTS: Final = ("aten::_fused_adam", "aten::_fused_sgd_", "aten::_foreach_", "kitsune::adamw", "kitsune::cast_all")
CONVOLUTION: Final = "aten::convolution_backward"
MASK: Final = 10  # position of the argument output_mask
#: Updates that do the same to every element. A block of threads handles up to 65 536, and a kernel up to 36 tensors.
ELEMENTWISE: Final = ("aten::_fused_adam", "aten::_fused_sgd_")
#: Buckets of up to this size are updated as smaller parts. They would have at most 16 blocks, which take 50 us each on
#: an H200 and leave most of the GPU idle at the end of the step; more blocks have less to do each.
PARTED_BYTES: Final = 2**22
PARTS: Final = 36
PART_ELEMENTS: Final = (2**12, 2**14)  # minimum and maximum
VECTOR_ELEMENTS: Final = 64  # no current processor updates more elements in one vector operation
FIRST_BYTES: Final = 2**14  # size of the bucket that is ready last; each one before it may be GROWTH times as large
GROWTH: Final = 4


def split(recording: Recording, bucket_bytes: int) -> Recording:
    """The step with launches split, and updates in buckets of up to `bucket_bytes`. Results are the same to the bit.

    A list is not split if a tensor beside it has a value for each entry, or if its entries overlap in memory.
    """
    graph = recording.graph
    smaller: list[Pair] = []
    depth: dict[int, int] = {}  # storage -> length of the longest chain of launches up to its last writer
    for pair in zip(graph.launches, recording.calls, strict=True):
        for launch, call in list(pieces(pair, bucket_bytes, depth)):
            smaller.append((launch, call))
            behind = 1 + latest(launch.touches, depth)
            depth |= {span.storage: behind for span in launch.writes}
    launches, calls = zip(*smaller, strict=True) if smaller else ((), ())
    return replace(recording, graph=LaunchGraph.of(launches, graph.storages), calls=tuple(calls))


def pieces(pair: Pair, bucket_bytes: int, depth: Mapping[int, int]) -> Iterator[Pair]:
    _, call = pair
    name = operation_of(call)
    if name == CONVOLUTION and all(call.arguments[MASK][:2]):
        return gradients_apart(pair)
    if name.startswith(LISTS):
        return buckets(pair, bucket_bytes, depth)
    return iter([pair])


def gradients_apart(pair: Pair) -> Iterator[Pair]:
    """convolution_backward as two launches: the gradient of the input, and those of weight and bias."""
    launch, call = pair
    with_bias = call.arguments[MASK][2]
    for suffix, mask in (("input", (True, False, False)), ("weight", (False, True, with_bias))):
        results = tuple(place if wanted else None for place, wanted in zip(call.results, mask, strict=True))
        arguments = (*call.arguments[:MASK], list(mask), *call.arguments[MASK + 1 :])
        writes = spans(place for place in results if place is not None)
        named = replace(launch, name=f"{launch.name} of {suffix}", writes=writes)
        yield named, replace(call, arguments=arguments, results=results)


def buckets(pair: Pair, bucket_bytes: int, depth: Mapping[int, int]) -> Iterator[Pair]:
    """The launch as several, each for tensors, or parts of large ones, that are ready at about the same time.

    It stays one launch if all are ready at once, as after a clipping of all gradients.
    """
    launch, whole = pair
    call = with_large_split(whole, bucket_bytes)
    results = call.results if any(call.results) else ()
    given = (*call.arguments, *call.named.values())
    lists = [value for value in (*given, results) if is_list(value) and value]
    tensors: Sequence[TensorView] = next(filter(is_places, lists), ())
    of_all = list(places_of([value for value in given if not is_list(value)]))
    is_even = all(len(value) == len(tensors) for value in lists) and all(count_of(each) == 1 for each in of_all)
    if not is_even or not are_apart(call, len(tensors)):
        yield pair
        return
    places = [(*of_all, *filter(is_place, each)) for each in zip(*lists, strict=True)]
    ready = [latest([place.storage for place in each], depth) for each in places]
    groups = by_readiness(list(map(nbytes_of, tensors)), ready, bucket_bytes)
    if len(groups) < 2:
        yield launch, in_parts(whole)
        return
    left = set(call.allocates)
    for chosen in groups:
        arguments = tuple(part(value, chosen) for value in call.arguments)
        named = {name: part(value, chosen) for name, value in call.named.items()}
        reads, writes = accesses(call.function, arguments, named)
        made = part(results, chosen)
        piece = replace(launch, reads=spans(reads), writes=spans([*writes, *filter(None, made)]))
        allocates = tuple(storage for storage in call.allocates if storage in left.intersection(piece.touches))
        left.difference_update(piece.touches)  # entries may be parts of one storage, which is allocated once
        smaller = replace(call, arguments=arguments, named=named, results=tuple(made), allocates=allocates)
        yield piece, in_parts(smaller)


def with_large_split(call: Call, most_bytes: int) -> Call:
    """The call with tensors of more than `most_bytes` as flat parts, so that these can run side by side.

    A fused kernel of torch's has up to 320 blocks, and an H200 holds 264 of them at once. For the 94 MB of BERT-base's
    word embedding, 56 blocks began only when the others had ended, and the 38 of a second kernel after those: 316 us in
    all at the end of the step.
    """
    tensors = updated_tensors(call)
    if all(nbytes_of(tensor) <= most_bytes for tensor in tensors):
        return call
    return cut_into_parts(call, tensors, most_bytes // tensors[0].dtype.itemsize)


def in_parts(call: Call) -> Call:
    """The call with its tensors as flat parts, if it is an update of up to PARTED_BYTES."""
    tensors = updated_tensors(call)
    if not tensors or sum(map(nbytes_of, tensors)) > PARTED_BYTES:
        return call
    return cut_into_parts(
        call, tensors, min(max(sum(map(count_of, tensors)) // PARTS, PART_ELEMENTS[0]), PART_ELEMENTS[1])
    )


def updated_tensors(call: Call) -> Sequence[TensorView]:
    """The first of the call's lists if the call does the same to every element; otherwise an empty list."""
    lists = [value for value in (*call.arguments, *call.named.values()) if is_places(value)]
    is_elementwise = operation_of(call).startswith(ELEMENTWISE) and len({len(each) for each in lists}) == 1
    return lists[0] if is_elementwise and all(map(are_parallel, zip(*lists, strict=True))) else ()


def cut_into_parts(call: Call, tensors: Sequence[TensorView], elements: int) -> Call:
    """The call with its lists, of which `tensors` is the first, as flat parts of about `elements` elements.

    All parts but the last are whole vectors, because a CPU rounds differently in the remainder after them. Parts of one
    tensor share its step counter.
    """
    elements = max(math.ceil(elements / VECTOR_ELEMENTS), 1) * VECTOR_ELEMENTS
    counts = [max(math.ceil(count_of(tensor) / elements), 1) for tensor in tensors]

    def flat(value: Any) -> Any:
        if not is_places(value):
            return value
        return [part for place, count in zip(value, counts, strict=True) for part in parts_of(place, count, elements)]

    named = {name: flat(value) for name, value in call.named.items()}
    return replace(call, arguments=tuple(map(flat, call.arguments)), named=named)


def parts_of(place: TensorView, count: int, elements: int) -> Iterator[TensorView]:
    """A dense tensor as flat parts of `elements` elements; a tensor of one element is repeated for each part."""
    whole = count_of(place)
    for begin in range(0, count * elements, elements):
        if whole == 1:
            yield place
        else:
            offset, size = place.offset + begin, min(elements, whole - begin)
            yield replace(place, size=(size,), stride=(1,), offset=offset)


def are_parallel(entry: Sequence[TensorView]) -> bool:
    """Whether the first tensor is dense, and all others have the same size and strides, or one element."""
    first = entry[0]
    return has_no_gaps(first.size, first.stride) and all(
        count_of(other) == 1 or (other.size, other.stride) == (first.size, first.stride) for other in entry
    )


def are_apart(call: Call, count: int) -> bool:
    """Whether no entry of the call's lists writes bytes that another entry reads or writes."""
    seen: dict[tuple[Span, bool], set[int]] = {}  # (bytes, whether they are written) -> entries
    for at in range(count):
        named = {name: part(value, [at]) for name, value in call.named.items()}
        reads, writes = accesses(call.function, tuple(part(value, [at]) for value in call.arguments), named)
        for places, is_written in ((reads, False), (writes, True)):
            for span in filter(is_filled, spans(places)):
                seen.setdefault((span, is_written), set()).add(at)
    open_spans: list[tuple[Span, bool, set[int]]] = []
    for (span, is_written), entries in sorted(seen.items(), key=lambda item: astuple(item[0][0])):
        open_spans = [each for each in open_spans if each[0].storage == span.storage and each[0].end > span.begin]
        open_spans.append((span, is_written, entries))
        if any((wrote or is_written) and len(others | entries) > 1 for _, wrote, others in open_spans):
            return False
    return True


def latest(storages: Iterable[int], depth: Mapping[int, int]) -> int:
    """The depth at which all of these storages are ready."""
    return max((depth.get(storage, 0) for storage in storages), default=0)


def by_readiness(sizes_bytes: Sequence[int], ready: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Groups of positions in a list, the first to be ready first; smaller groups for what is ready last.

    `ready`: larger means later; if all are equal there is one group. A group has at most `most_bytes`, or one tensor.
    """
    if len(set(ready)) < 2:
        return [list(range(len(ready)))]
    groups: list[list[int]] = []
    limit_bytes, left_bytes = FIRST_BYTES // GROWTH, -1
    for at in sorted(range(len(ready)), key=lambda at: -ready[at]):
        left_bytes -= sizes_bytes[at]
        if left_bytes < 0:
            limit_bytes = min(limit_bytes * GROWTH, most_bytes)
            left_bytes = limit_bytes - sizes_bytes[at]
            groups.append([])
        groups[-1].append(at)
    return [sorted(group) for group in reversed(groups)]


def operation_of(call: Call) -> str:
    """The name of the operation; "" for a Triton kernel."""
    return call.function._schema.name if isinstance(call.function, torch._ops.OpOverload) else ""


def count_of(place: TensorView) -> int:
    return math.prod(place.size)


def nbytes_of(place: TensorView) -> int:
    span = place.span()
    return span.end - span.begin


def part(value: Any, chosen: Sequence[int]) -> Any:
    return [value[at] for at in chosen] if is_list(value) and value else value


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def is_places(value: Any) -> bool:
    return is_list(value) and bool(value) and all(isinstance(item, TensorView) for item in value)
