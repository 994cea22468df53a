"""Renaming: gives each value memory of its own, which removes write-after-read and write-after-write hazards.

Inductor gives the memory of a dead value to the next value of its size. On one stream that costs nothing. On several,
otherwise independent launches wait for each other: in BERT-base the projections to keys and values waited for the one
to queries, whose bias lay there before. Processors rename registers for the same reason (Tomasulo 1967).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.model.recording import Call, Recording, TensorView, map_places, places_of


def renamed(recording: Recording) -> Recording:
    """The step with new memory for every value that overwrites one of the step's own storages as a whole.

    The results are the same to the bit. Memory from before the step, or that is written only in part, is not renamed.
    """
    graph = recording.graph
    storages = list(graph.storages)
    now = {number: number for number in range(len(storages))}  # recorded storage -> storage of its newest value
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
        return  # an operation of the user's may leave part of its out= unwritten
    written = {span.storage for span in launch.writes} - {span.storage for span in launch.reads}
    for place in places_of((call.arguments, call.named)):
        if place.storage in written and storages[place.storage].is_own and is_whole(place, storages[place.storage]):
            yield place.storage


def is_whole(place: TensorView, storage: Storage) -> bool:
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
    """The call on the renamed storages; those for `fresh` must be allocated before it."""
    return replace(
        call,
        arguments=placed_in(call.arguments, now),
        named=placed_in(dict(call.named), now),
        results=placed_in(call.results, now),
        allocates=tuple(now[number] for number in (*call.allocates, *fresh)),
    )


def placed_in(tree: Any, now: Mapping[int, int]) -> Any:
    return map_places(lambda place: replace(place, storage=now[place.storage]), tree)
