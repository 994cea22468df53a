"""Tools for the memory of a training loop: prefetching, double buffers, a memory pool and lifetime analysis.

Of these the runtime uses only `Prefetcher`, behind `TrainStep.batches`. `DoubleBuffer`, `MemoryPool` and
`LifetimeAnalyzer` are documented tools for the user's own code; nothing else in Kitsune uses them.
"""

from kitsune.memory.arena import ReusePlan
from kitsune.memory.double_buffer import DoubleBuffer
from kitsune.memory.lifetime import LifetimeAnalyzer
from kitsune.memory.pool import MemoryPool, PoolStats
from kitsune.memory.prefetch import Prefetched, Prefetcher
from kitsune.memory.suggestion import Suggestion
from kitsune.memory.timeline import Lifetime, Moment

__all__ = [
    "DoubleBuffer",
    "Lifetime",
    "LifetimeAnalyzer",
    "MemoryPool",
    "Moment",
    "PoolStats",
    "Prefetched",
    "Prefetcher",
    "ReusePlan",
    "Suggestion",
]
