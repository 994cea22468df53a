"""A workload's `batches` in: the ones that are held out, and streams without end of all others, out."""

from collections.abc import Iterator
from itertools import chain, count, islice
from random import Random
from typing import Final

import torch

from kitsune.errors import SURPRISES, WorkloadError
from kitsune.workload import Batch, Workload, batch_tensors

#: Batches; of an iterable with fewer than twice as many, half of a pass.
HELD_OUT: Final = 8
#: Of a function of a seed: the seed of the batches that are held out, which no training has.
HELD_OUT_SEED: Final = 2**31 - 1
#: Between the passes of one training, so that none of another training's are among them.
SEEDS_APART: Final = 10_007
#: Batches of an iterable from which the next one is drawn.
MIXED: Final = 8
#: Batches of other shapes in a row, after which no other is waited for.
MOST_UNFIT: Final = 1000
#: What code that reads a data set raises.
TROUBLES: Final = (*SURPRISES, AttributeError, NameError, ImportError, OSError)


class Data:
    """Batches of the shapes of the example; others, as the last one of a pass, are left out."""

    def __init__(self, workload: Workload, name: str) -> None:
        """Raises WorkloadError where there is only the one batch, or none that fits."""
        if workload.batches is None:
            raise WorkloadError(
                f"{name} has one batch only, from which nothing can be learnt that holds for others: "
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
        """Pass after pass without those that are held out; of an iterable, the first ones of each pass are, and the
        others come in an order of the seed."""
        for turn in count():
            seed_of_pass = seed + SEEDS_APART * turn
            if self.is_seeded:
                yield from self._pass(seed_of_pass)
            else:
                chance = Random(seed_of_pass)  # noqa: S311 - an order, not secrets
                yield from mixed(islice(self._pass(seed_of_pass), len(self.held_out), None), chance)

    def _pass(self, seed: int) -> Iterator[Batch]:
        """Code of the user's: what goes wrong inside leaves as a WorkloadError."""
        unfit = 0
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # a DataLoader shuffles by it when it gives its first batch
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
    """All of them, each drawn from the next few: a list has one order, and trainings of several seeds need several."""
    held = list(islice(batches, MIXED))
    for batch in batches:
        place = chance.randrange(len(held))
        yield held[place]
        held[place] = batch
    chance.shuffle(held)
    yield from held
