"""Cuts the recording of a forward and its backward in two, so that each becomes a graph of its own.

Memory that crosses, made by the first part and used by the second, stays where the first graph puts it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Storage
from kitsune.launches.model.recording import Recording, TensorView, places_of


def first_half(recording: Recording, cut: int) -> Recording:
    """The launches before the cut. Its result is (what the first part returned, {storage that crosses: its bytes})."""
    crossing = crossing_of(recording, cut)
    launches = recording.graph.launches[:cut]
    touched = touched_by(launches)
    storages = [
        Storage(each.nbytes, each.is_own and number in touched, each.is_kept or number in crossing)
        for number, each in enumerate(recording.graph.storages)
    ]
    returned, _ = recording.result
    result = returned, {number: byte_place(number, recording) for number in sorted(crossing)}
    return replace(recording, graph=LaunchGraph.of(launches, storages), calls=recording.calls[:cut], result=result)


def second_half(recording: Recording, cut: int, crossed: Mapping[int, torch.Tensor]) -> Recording:
    """The launches behind the cut. What crosses is in the memory where a run of the first half left it."""
    launches = recording.graph.launches[cut:]
    touched = touched_by(launches)
    storages = [
        replace(each, is_own=each.is_own and number in touched and number not in crossed)
        for number, each in enumerate(recording.graph.storages)
    ]
    _, returned = recording.result
    graph = LaunchGraph.of(launches, storages)
    return held_by(crossed, replace(recording, graph=graph, calls=recording.calls[cut:], result=returned))


def held_by(crossed: Mapping[int, torch.Tensor], recording: Recording) -> Recording:
    """Copy of the recording that holds what crosses in the memory of these tensors."""
    storages = {number: tensor.untyped_storage() for number, tensor in crossed.items()}
    return replace(recording, held={**recording.held, **storages})


def crossing_of(recording: Recording, cut: int) -> frozenset[int]:
    """The step's own storages that the first part makes and the second names or returns, empty ones included."""
    launches, (_, returned) = recording.graph.launches, recording.result
    after = touched_by(launches[cut:]) | {place.storage for place in places_of(returned)}
    crossing = touched_by(launches[:cut]) & after
    return frozenset(number for number in crossing if recording.graph.storages[number].is_own)


def touched_by(launches: Iterable[Launch]) -> set[int]:
    return {storage for launch in launches for storage in launch.touches}


def byte_place(number: int, recording: Recording) -> TensorView:
    return TensorView(number, torch.uint8, (recording.graph.storages[number].nbytes,), (1,), 0)
