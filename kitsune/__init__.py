"""Kitsune tunes a PyTorch training step on the GPU it runs on, verifies its numbers, and trains with the tuned plan.

Public names are bound lazily (PEP 562): `import kitsune` costs milliseconds and does not touch torch.
"""

import importlib
import random
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "KitsuneError": "kitsune.errors",
    "Plan": "kitsune.plan",
    "Workload": "kitsune.workload",
    "TrainStep": "kitsune.step",
    "KitsuneOptimizer": "kitsune.optimizer",
    "AMPConfig": "kitsune.amp",
    "FusionConfig": "kitsune.fusion",
    "StreamConfig": "kitsune.streams",
    "export": "kitsune.submission.exporting.export",
    "fetch_plan": "kitsune.client.remote_tuning",
    "submit": "kitsune.client.remote_tuning",
    "tune": "tuner.api",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from kitsune.amp import AMPConfig as AMPConfig
    from kitsune.client.remote_tuning import fetch_plan as fetch_plan
    from kitsune.client.remote_tuning import submit as submit
    from kitsune.errors import KitsuneError as KitsuneError
    from kitsune.fusion import FusionConfig as FusionConfig
    from kitsune.optimizer import KitsuneOptimizer as KitsuneOptimizer
    from kitsune.plan import Plan as Plan
    from kitsune.step import TrainStep as TrainStep
    from kitsune.streams import StreamConfig as StreamConfig
    from kitsune.submission.exporting.export import export as export
    from kitsune.workload import Workload as Workload
    from tuner.api import tune as tune


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kitsune' has no attribute {name!r}")
    state = random.getstate()  # importing rich draws from this generator: the user's seed must not notice
    try:
        value = getattr(importlib.import_module(home), name)
    finally:
        random.setstate(state)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
