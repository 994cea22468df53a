"""Tools for the memory of a training loop: prefetching, double buffers, a memory pool, lifetime analysis, checkpoints
and offloading.

Of these the runtime uses only `Prefetcher`, behind `TrainStep.batches`. The others are documented tools for the user's
own code; nothing else in Kitsune uses them.
"""

from kitsune.memory.arena import ReusePlan
from kitsune.memory.checkpointing import AdaptiveCheckpointing, SelectiveGradientCheckpointing
from kitsune.memory.double_buffer import DoubleBuffer
from kitsune.memory.lifetime import LifetimeAnalyzer
from kitsune.memory.offloading import DynamicActivationOffloading
from kitsune.memory.pool import MemoryPool, PoolStats
from kitsune.memory.prefetch import Prefetched, Prefetcher
from kitsune.memory.suggestion import Suggestion
from kitsune.memory.timeline import Lifetime, Moment

__all__ = [
    "AdaptiveCheckpointing",
    "DoubleBuffer",
    "DynamicActivationOffloading",
    "Lifetime",
    "LifetimeAnalyzer",
    "MemoryPool",
    "Moment",
    "PoolStats",
    "Prefetched",
    "Prefetcher",
    "ReusePlan",
    "SelectiveGradientCheckpointing",
    "Suggestion",
]
