"""Splits a workload's `batches` into held-out batches and endless training streams."""

from collections.abc import Iterator
from itertools import chain, count, islice
from random import Random
from typing import Final

import torch

from kitsune.errors import SURPRISES, WorkloadError
from kitsune.workload import Batch, Workload, batch_tensors

#: Number of held-out batches; half of a pass if an iterable has fewer than twice as many.
HELD_OUT: Final = 8
#: Seed of the held-out batches, if `batches` is a function of a seed. No training uses it.
HELD_OUT_SEED: Final = 2**31 - 1
#: Distance between the seeds of two passes of one training, so that passes of different trainings do not coincide.
SEEDS_APART: Final = 10_007
#: Size of the shuffle buffer for an iterable, in batches.
MIXED: Final = 8
#: After so many batches of other shapes in a row, reading is given up.
MOST_UNFIT: Final = 1000
#: Exceptions that code which reads a data set may raise.
TROUBLES: Final = (*SURPRISES, AttributeError, NameError, ImportError, OSError)


class Data:
    """The batches that have the shapes of the example. Others, like the last one of a pass, are skipped."""

    def __init__(self, workload: Workload, name: str) -> None:
        """Raises WorkloadError when the workload has no `batches`, or too few of them fit."""
        if workload.batches is None:
            raise WorkloadError(
                f"{name} has one batch only, so there are no others to hold out: "
                "return kitsune.Workload(model, loss_fn, optimizer, batch, batches=...)"
            )
        self._batches = workload.batches
        self._shapes = [tensor.shape for tensor in batch_tensors(workload.batch)]
        self._name = name
        found = list(islice(self._pass(HELD_OUT_SEED), HELD_OUT if self.is_seeded else 2 * HELD_OUT))
        if len(found) < 2:
            raise WorkloadError(f"batches of {name} hold {len(found)} of the shapes of the example: no fresh ones")
        self.held_out = found if self.is_seeded else found[: len(found) // 2]

    @property
    def is_seeded(self) -> bool:
        return callable(self._batches)

    def stream(self, seed: int) -> Iterator[Batch]:
        """Pass after pass, without the held-out batches. An iterable's first batches are held out; the others are
        shuffled by the seed."""
        for turn in count():
            seed_of_pass = seed + SEEDS_APART * turn
            if self.is_seeded:
                yield from self._pass(seed_of_pass)
            else:
                chance = Random(seed_of_pass)  # noqa: S311 - an order, not secrets
                yield from mixed(islice(self._pass(seed_of_pass), len(self.held_out), None), chance)

    def _pass(self, seed: int) -> Iterator[Batch]:
        """One pass over the user's batches. Errors of the user's code are raised as WorkloadError."""
        unfit = 0
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # a DataLoader seeds its shuffling from it at its first batch
                source = iter(self._batches(seed) if callable(self._batches) else self._batches)
                first = list(islice(source, 1))
            for batch in chain(first, source):
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    raise WorkloadError(f"batches of {self._name} give a {type(batch).__name__}, and no pair (x, y)")
                unfit = 0 if [each.shape for each in batch_tensors(tuple(batch))] == self._shapes else unfit + 1
                if not unfit:
                    yield batch[0], batch[1]
                elif unfit == MOST_UNFIT:
                    raise WorkloadError(f"batches of {self._name} have other shapes than the example")
        except TROUBLES as error:
            what = f"{type(error).__name__}: {error}"[:1000]
            raise WorkloadError(f"batches of {self._name} failed: {what}") from error


def mixed(batches: Iterator[Batch], chance: Random) -> Iterator[Batch]:
    """Shuffles the batches within a buffer of MIXED: a list has only one order, and each seed needs its own."""
    held = list(islice(batches, MIXED))
    for batch in batches:
        place = chance.randrange(len(held))
        yield held[place]
        held[place] = batch
    chance.shuffle(held)
    yield from held
