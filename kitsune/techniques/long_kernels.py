"""Coordinate descent tuning of Inductor's long kernels only: most kernels of a step are too short to matter."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

#: Shorter kernels are not tuned: a tenth less of one is below 2 us a launch. Of the 37 kernels of Inductor's that take
#: most of a ViT-B/16 with 64 images on an H200, 16 are not shorter, with 75 % of the time of the 37 (GPT-2 with 8 x 512
#: tokens: 10 of 27, with 45 %; results/budget/2026-11-29-h200-2.jsonl and -3.jsonl).
LEAST_MS: Final = 0.02
#: Inductor takes any value that is not zero as "on", and copies it into the source of each kernel. So LEAST_MS as its
#: value marks the kernels that this module is for, and they are apart from those of the user in all of torch's caches.
SWITCH: Final = "coordinate_descent_tuning"
TUNER: Final = "torch._inductor.runtime.coordinate_descent_tuner"


@functools.cache
def leave_short_kernels() -> None:
    """From now on this process tunes the marked kernels only if they are long. Other kernels are tuned as before.

    So are marked ones, where this version of torch has another tuner.
    """
    try:
        tuner: Any = getattr(importlib.import_module(TUNER), "CoordescTuner", None)
    except ImportError:
        return
    if hasattr(tuner, "autotune") and hasattr(tuner, "call_func"):
        tuner.autotune = of_long_kernels(tuner.autotune)


def of_long_kernels(autotune: Callable[..., Any]) -> Callable[..., Any]:
    """The method of Inductor's tuner that finds a configuration. The first one is the answer for a short kernel.

    Inductor then does with it what it does when nothing better was found: it keeps it on disk as the tuned one. A first
    configuration that spills registers has an infinite time, so it is tuned.
    """

    @functools.wraps(autotune)
    def tuned(tuner: Any, func: Callable[[Any], float], baseline_config: Any, *others: Any, **named: Any) -> Any:
        is_marked = getattr(tuner, "inductor_meta", {}).get(SWITCH) == LEAST_MS
        if is_marked and tuner.call_func(func, baseline_config) < LEAST_MS:  # the tuner remembers what it has measured
            return baseline_config
        return autotune(tuner, func, baseline_config, *others, **named)

    return tuned
