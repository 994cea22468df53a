"""Memory around a training step: a pool of blocks, lifetimes and their arena, batches fetched ahead, double buffers."""

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
