"""The view of the page of a training step: its runs and gains over time, by GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.charts.drawing import words
from server.charts.trend import TrendPoint
from tuner.records import Run
from tuner.store.queries.runs import label_of

NO_GPU = "not looked at yet"


@dataclass(frozen=True, slots=True)
class GpuView:
    """The runs on one GPU model, newest first, and the gains of their plans, oldest first, if there are several."""

    gpu: str
    best: Run | None
    runs: tuple[Run, ...]
    moments: tuple[TrendPoint, ...]


@dataclass(frozen=True, slots=True)
class ModelView:
    """The page of a training step."""

    title: str
    other_names: tuple[str, ...]
    gpus: tuple[GpuView, ...]


def model_view(runs: Sequence[Run]) -> ModelView:
    """`runs`: newest first, at least one."""
    names = list(dict.fromkeys(map(label_of, runs)))
    gpus = dict.fromkeys(gpu_of(run) for run in runs)
    return ModelView(names[0], tuple(names[1:]), tuple(_gpu(gpu, runs) for gpu in gpus))


def gpu_of(run: Run) -> str:
    return run.environment.gpu if run.environment else NO_GPU


def _gpu(gpu: str, runs: Sequence[Run]) -> GpuView:
    here = tuple(run for run in runs if gpu_of(run) == gpu)
    gained = [run for run in here if run.speedup is not None]
    best = max(gained, key=lambda run: run.speedup.median if run.speedup else 0.0, default=None)
    moments = tuple(map(_moment, reversed(gained)))
    return GpuView(gpu, best, here, moments if len(moments) > 1 else ())


def _moment(run: Run) -> TrendPoint:
    gain = run.speedup
    assert gain is not None
    label = f"{words.gain(gain)} by run {words.short(run.id)}"
    return TrendPoint(run.finished_at or run.created_at, gain.median, gain.low, gain.high, label, f"/runs/{run.id}")
