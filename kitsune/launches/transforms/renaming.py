"""A Recording in, the same step out, with memory of its own for whatever is written anew.

Inductor gives the memory of a value that nobody needs any more to the next one of its size. On one stream that costs
nothing; on several, launches that have nothing to do with each other wait for that memory: in BERT-base the projections
to keys and to values waited for the one to queries, whose bias lay there before. So values are renamed, as processors
do it with registers (Tomasulo 1967).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.model.recording import Call, Place, Recording, map_places, places_of


def renamed(recording: Recording) -> Recording:
    """The results are the same to the bit. What was there before the step, or is written in part only, stays."""
    graph = recording.graph
    storages = list(graph.storages)
    now = {number: number for number in range(len(storages))}  # as recorded -> where its newest value lies
    touched: set[int] = set()
    launches, calls = [], []
    for launch, call in zip(graph.launches, recording.calls, strict=True):
        fresh = sorted(set(overwritten(launch, call, graph.storages)) & touched)
        for number in fresh:
            storages[now[number]] = replace(storages[now[number]], is_kept=False)
            now[number] = len(storages)
            storages.append(graph.storages[number])
        touched.update(launch.touches)
        launches.append(replace(launch, reads=moved(launch.reads, now), writes=moved(launch.writes, now)))
        calls.append(call_in(call, now, fresh))
    result = placed_in(recording.result, now)
    return replace(recording, graph=LaunchGraph.of(launches, storages), calls=tuple(calls), result=result)


def overwritten(launch: Launch, call: Call, storages: tuple[Storage, ...]) -> Iterator[int]:
    """The step's own storages of which the launch writes every byte and reads none."""
    if isinstance(call.function, torch._ops.OpOverload) and call.function.namespace != "aten":
        return  # an operation of the user's may leave part of its out= as it is
    written = {span.storage for span in launch.writes} - {span.storage for span in launch.reads}
    for place in places_of((call.arguments, call.named)):
        if place.storage in written and storages[place.storage].is_own and is_whole(place, storages[place.storage]):
            yield place.storage


def is_whole(place: Place, storage: Storage) -> bool:
    """Whether every byte of the storage is in exactly one element: no gaps, no overlaps."""
    width = 1
    for stride, size in sorted(zip(place.stride, place.size, strict=True)):
        if size != 1 and stride != width:
            return False
        width *= size
    return width * place.dtype.itemsize == storage.nbytes > 0


def moved(spans: tuple[Span, ...], now: Mapping[int, int]) -> tuple[Span, ...]:
    return tuple(replace(span, storage=now[span.storage]) for span in spans)


def call_in(call: Call, now: Mapping[int, int], fresh: list[int]) -> Call:
    """The call in the memory of now, of which `fresh` must be made before it."""
    return replace(
        call,
        arguments=placed_in(call.arguments, now),
        named=placed_in(dict(call.named), now),
        results=placed_in(call.results, now),
        allocates=tuple(now[number] for number in (*call.allocates, *fresh)),
    )


def placed_in(tree: Any, now: Mapping[int, int]) -> Any:
    return map_places(lambda place: replace(place, storage=now[place.storage]), tree)
