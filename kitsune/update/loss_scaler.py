"""Dynamic loss scaling with device tensors only, so that it can be captured in a CUDA graph.

The rule is that of torch.amp.GradScaler (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2): multiply
the loss by the scale; if a gradient overflows, skip the update and reduce the scale; after enough good steps, grow it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from kitsune.amp import ScalerStatistics

#: The attributes that are kept from step to step, and in checkpoints.
STATE: Final = ("scale", "growth_tracker", "steps", "skipped")


class LossScaler:
    """Scale, growth tracker and overflow flag: fp32, int32 and fp32 tensors of one element on `device`.

    The counters `steps` and `skipped` are on the device too, so that replays of a graph are counted.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def statistics(self) -> ScalerStatistics:
        """Steps, skipped steps and the current scale. Waits for the device."""
        return ScalerStatistics(int(self.steps), int(self.skipped), float(self.scale))

    def state_dict(self) -> dict[str, float]:
        """Scale, growth tracker and counts as numbers. Waits for the device."""
        return {name: getattr(self, name).item() for name in STATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Loads in place, so that captured graphs use the loaded values."""
        for name in STATE:
            getattr(self, name).fill_(state[name])

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divides the gradients by the scale in place, and sets `found_inf` to 1 if one is not finite.

        `found_inf` stays set until `update`, so that one bad micro-batch skips the whole accumulated step.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        inverse = self.scale.double().reciprocal().float()
        for tensors in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, self.found_inf, inverse)

    def update(self) -> None:
        """Reduces the scale after an overflow, grows it after `growth_interval` good steps. No host sync."""
        self.steps.add_(1)
        self.skipped.add_(self.found_inf.to(torch.int64))
        torch._amp_update_scale_(
            self.scale,
            self.growth_tracker,
            self.found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self.found_inf.zero_()
