"""A Recording in, the same step in more and smaller launches out: what may overlap is only what is apart.

The gradients of a convolution are two kernels behind one operation; what an optimizer or a clipping of gradients does
to a list of tensors needs, for each of them, no other. So the update of the last layers may begin while the backward
goes on, and behind the backward only that of the first ones is left. Its bucket is small: on an H200 a fused AdamW
takes 38 us for the 61 706 parameters of LeNet, a sixth of the step: one block of threads does 65 536 of them alone.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final

import torch

from kitsune.kernels.layouts import has_no_gaps
from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, is_filled
from kitsune.launches.model.recording import Call, Place, Recording, is_place, places_of, spans
from kitsune.launches.recording.recorder import accesses

Pair = tuple[Launch, Call]

#: Operations over parallel lists: what they do to one tensor is no business of the next one's.
LISTS: Final = ("aten::_fused_adam", "aten::_fused_sgd_", "aten::_foreach_", "kitsune::adamw")
CONVOLUTION: Final = "aten::convolution_backward"
MASK: Final = 10  # position of output_mask
#: Updates that do the same to every element, by a block of threads for 65 536 of them at most, and 36 tensors a kernel.
ELEMENTWISE: Final = ("aten::_fused_adam", "aten::_fused_sgd_")
#: What is ready last leaves most of a GPU idle so: on an H200 a block takes 50 us, and buckets of that many bytes and
#: less have up to 16. Their tensors are handed over in parts, and more blocks have less to do each.
PARTED_BYTES: Final = 2**22
PARTS: Final = 36
PART_ELEMENTS: Final = (2**12, 2**14)  # the least and the most
VECTOR_ELEMENTS: Final = 64  # no processor of today works on more numbers of an update at once
FIRST_BYTES: Final = 2**14  # of the bucket that is ready last; those before it may be GROWTH times as large as the next
GROWTH: Final = 4


def split(recording: Recording, bucket_bytes: int) -> Recording:
    """The results are the same to the bit: every kernel computes what it computed, on the same operands.

    Lists stay whole where a tensor beside them has a number for each of theirs, or where one entry lies on another.
    """
    graph = recording.graph
    smaller: list[Pair] = []
    level: dict[int, int] = {}  # storage -> how many launches there are in a row up to the last one that writes it
    for pair in zip(graph.launches, recording.calls, strict=True):
        for launch, call in list(pieces(pair, bucket_bytes, level)):
            smaller.append((launch, call))
            behind = 1 + latest(launch.touches, level)
            level |= {span.storage: behind for span in launch.writes}
    launches, calls = zip(*smaller, strict=True) if smaller else ((), ())
    return replace(recording, graph=LaunchGraph.of(launches, graph.storages), calls=tuple(calls))


def pieces(pair: Pair, bucket_bytes: int, level: Mapping[int, int]) -> Iterator[Pair]:
    _, call = pair
    name = operation_of(call)
    if name == CONVOLUTION and all(call.arguments[MASK][:2]):
        return gradients_apart(pair)
    if name.startswith(LISTS):
        return buckets(pair, bucket_bytes, level)
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


def buckets(pair: Pair, bucket_bytes: int, level: Mapping[int, int]) -> Iterator[Pair]:
    """The lists in pieces, each of tensors that are ready at about the same time, or of parts of large ones. Where all
    are ready at once, as behind a clipping of all gradients, they stay one launch: there is nothing to begin with."""
    launch, whole = pair
    call = without_large(whole, bucket_bytes)
    results = call.results if any(call.results) else ()
    given = (*call.arguments, *call.named.values())
    lists = [value for value in (*given, results) if is_list(value) and value]
    tensors: Sequence[Place] = next(filter(is_places, lists), ())
    of_all = list(places_of([value for value in given if not is_list(value)]))
    is_even = all(len(value) == len(tensors) for value in lists) and all(count_of(each) == 1 for each in of_all)
    if not is_even or not are_apart(call, len(tensors)):
        yield pair
        return
    places = [(*of_all, *filter(is_place, each)) for each in zip(*lists, strict=True)]
    ready = [latest([place.storage for place in each], level) for each in places]
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
        left.difference_update(piece.touches)  # entries may be parts of one storage, which is made once
        smaller = replace(call, arguments=arguments, named=named, results=tuple(made), allocates=allocates)
        yield piece, in_parts(smaller)


def without_large(call: Call, most_bytes: int) -> Call:
    """The same with what is larger as flat parts, so that they may run side by side. A kernel of torch's has up to 320
    blocks, of which an H200 holds 264 at once: for the 94 MB of BERT-base's words 56 of them began when the others had
    ended, and the 38 of a second kernel behind those, 316 us in all at the end of the step."""
    tensors = updated(call)
    if all(nbytes_of(tensor) <= most_bytes for tensor in tensors):
        return call
    return parted(call, tensors, most_bytes // tensors[0].dtype.itemsize)


def in_parts(call: Call) -> Call:
    """The same with the tensors of its lists as flat parts, where it is a small update."""
    tensors = updated(call)
    if not tensors or sum(map(nbytes_of, tensors)) > PARTED_BYTES:
        return call
    return parted(call, tensors, min(max(sum(map(count_of, tensors)) // PARTS, PART_ELEMENTS[0]), PART_ELEMENTS[1]))


def updated(call: Call) -> Sequence[Place]:
    """The first of its lists, where a call does the same to every element of them; none otherwise."""
    lists = [value for value in (*call.arguments, *call.named.values()) if is_places(value)]
    is_elementwise = operation_of(call).startswith(ELEMENTWISE) and len({len(each) for each in lists}) == 1
    return lists[0] if is_elementwise and all(map(are_parallel, zip(*lists, strict=True))) else ()


def parted(call: Call, tensors: Sequence[Place], elements: int) -> Call:
    """The same with its lists, of which `tensors` is the first, as flat parts of about so many elements, whole vectors
    but for the last: a CPU rounds otherwise in what is left behind them. Parts of one tensor share its step."""
    elements = max(math.ceil(elements / VECTOR_ELEMENTS), 1) * VECTOR_ELEMENTS
    counts = [max(math.ceil(count_of(tensor) / elements), 1) for tensor in tensors]

    def flat(value: Any) -> Any:
        if not is_places(value):
            return value
        return [part for place, count in zip(value, counts, strict=True) for part in parts_of(place, count, elements)]

    named = {name: flat(value) for name, value in call.named.items()}
    return replace(call, arguments=tuple(map(flat, call.arguments)), named=named)


def parts_of(place: Place, count: int, elements: int) -> Iterator[Place]:
    """A dense tensor as flat parts of so many elements; what has one element stands beside each of them."""
    whole = count_of(place)
    for begin in range(0, count * elements, elements):
        if whole == 1:
            yield place
        else:
            offset, size = place.offset + begin, min(elements, whole - begin)
            yield replace(place, size=(size,), stride=(1,), offset=offset)


def are_parallel(entry: Sequence[Place]) -> bool:
    """Whether the others have a number for each element of the first, in the same order, or one for all of them."""
    first = entry[0]
    return has_no_gaps(first.size, first.stride) and all(
        count_of(other) == 1 or (other.size, other.stride) == (first.size, first.stride) for other in entry
    )


def are_apart(call: Call, count: int) -> bool:
    """Whether no entry of the lists of a call writes bytes that another entry touches."""
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


def latest(storages: Iterable[int], level: Mapping[int, int]) -> int:
    """The level at which all of them are there."""
    return max((level.get(storage, 0) for storage in storages), default=0)


def by_readiness(sizes_bytes: Sequence[int], ready: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Positions in a list in groups, small ones of what is ready last; a single group where all is ready at once.

    `ready`: a larger number is later. A group holds at most `most_bytes`, or one tensor. The first is ready first.
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
    """Its name, "" for a Triton kernel."""
    return call.function._schema.name if isinstance(call.function, torch._ops.OpOverload) else ""


def count_of(place: Place) -> int:
    return math.prod(place.size)


def nbytes_of(place: Place) -> int:
    span = place.span()
    return span.end - span.begin


def part(value: Any, chosen: Sequence[int]) -> Any:
    return [value[at] for at in chosen] if is_list(value) and value else value


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def is_places(value: Any) -> bool:
    return is_list(value) and bool(value) and all(isinstance(item, Place) for item in value)
