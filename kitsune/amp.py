"""Mixed precision chosen by the user: AMPConfig, autocast configured by it, and a GradScaler that counts its steps."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import torch
from torch.amp.grad_scaler import OptState

from kitsune.errors import SettingsError

#: Parameters of torch.amp.GradScaler, in the order in which it takes them after the device.
SCALING: Final = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
#: Keys of the counts in a scaler's state_dict, beside torch's own.
STEPS, SKIPPED = "kitsune_steps", "kitsune_skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class AMPConfig:
    """Mixed precision chosen by the user; `enabled=False` turns it off.

    With `dtype=None` it is bfloat16 where the device supports it, and float16 with loss scaling elsewhere.

    The other fields are those of torch.amp.GradScaler and apply to float16 only.
    """

    dtype: torch.dtype | None = None
    enabled: bool = True
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    growth_factor: float = 2.0
    init_scale: float = 65536.0

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16):
            raise SettingsError(f"AMPConfig.dtype is {self.dtype}; use torch.float16 or torch.bfloat16")
        if not isinstance(self.enabled, bool):
            raise SettingsError(f"AMPConfig.enabled is {self.enabled!r}; use True or False")
        for name in SCALING:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:  # type: ignore[operator]
                raise SettingsError(f"AMPConfig.{name} is {value!r}; it must be a finite number greater than 0")
        if not self.backoff_factor < 1 < self.growth_factor:
            raise SettingsError("AMPConfig needs 0 < backoff_factor < 1 < growth_factor")
        if not isinstance(self.growth_interval, Integral):
            raise SettingsError(f"AMPConfig.growth_interval is {self.growth_interval!r}; it must be a whole number")


def half_of(config: AMPConfig, device_type: str) -> torch.dtype:
    """The half-precision dtype that the configuration selects on this type of device."""
    if config.dtype is not None:
        return config.dtype
    return torch.bfloat16 if device_type != "cuda" or has_bf16() else torch.float16


def has_bf16() -> bool:
    """Whether the current GPU supports bfloat16 natively."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast(config: AMPConfig | None = None, *, device_type: str | None = None) -> torch.autocast:
    """torch.autocast as the configuration says, as a context manager or a decorator; on the GPU if there is one.

    Raises SettingsError when `config` is not an AMPConfig.
    """
    if not isinstance(config, AMPConfig | None):
        raise SettingsError(f"autocast() takes an AMPConfig, not {config!r:.100}; a device goes by device_type=")
    config, device_type = config or AMPConfig(), device_type or usual_device()
    return torch.autocast(device_type, dtype=half_of(config, device_type), enabled=config.enabled)


def kind_of(device: str | torch.device | None) -> str:
    """The type of a device: "cuda" or "cpu". Raises SettingsError when it is not a device."""
    if device is None:
        return usual_device()
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"GradScaler() takes a device as 'cuda' or 'cpu', not {device!r:.100}") from error


def over_config(config: Any, kind: str, numbers: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch's scaler: those given explicitly override the configuration. Raises SettingsError."""
    if not isinstance(config, AMPConfig):
        raise SettingsError(f"GradScaler() takes an AMPConfig as config=, not {config!r:.100}")
    names = (*SCALING, "enabled")
    given = dict(zip(names, numbers, strict=False))
    if len(numbers) > len(names) or given.keys() & named.keys():
        raise SettingsError(f"GradScaler() takes each of {', '.join(names)} once, in this order or by name")
    is_needed = config.enabled and half_of(config, kind) is torch.float16
    return {"enabled": is_needed, **{name: getattr(config, name) for name in SCALING}, **given, **named}


@dataclass(frozen=True, slots=True)
class ScalerStatistics:
    """What a GradScaler has done so far.

    `steps`: optimizer steps. `skipped`: how many of them were skipped because a gradient was not finite. `scale`: the
    current scale.
    """

    steps: int
    skipped: int
    scale: float


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that can be configured by an AMPConfig and counts its steps and skipped steps.

    `numbers` and `arguments` are torch's own and override the configuration, which may also be the first argument:
    `GradScaler(config)`. bfloat16 needs no scaling: with that dtype the scaler is disabled and passes everything
    through. Counting does not wait for the device until `statistics` is read. The counts are saved in `state_dict`,
    which torch's scaler can load too; loading a state_dict of torch's scaler resets them to 0.

    Raises SettingsError when the device is not a device, or `config` not an AMPConfig.
    """

    def __init__(
        self,
        device: str | torch.device | AMPConfig | None = None,
        *numbers: Any,
        config: AMPConfig | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(device, AMPConfig):
            if config is not None:
                raise SettingsError("GradScaler() takes one AMPConfig: as its first argument, or as config=")
            device, config = None, device
        kind = kind_of(device)
        if config is not None:
            arguments = over_config(config, kind, numbers, arguments)
            numbers = ()
        super().__init__(kind, *numbers, **arguments)
        self._steps = 0
        self._skipped: int | torch.Tensor = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's: call it once, after every optimizer has stepped."""
        states = self._per_optimizer_states.values() if self._enabled else ()
        for state in states:  # before super().update() changes and clears the flags
            if state["stage"] is OptState.STEPPED:
                self._count(list(state["found_inf_per_device"].values()))
        super().update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus the counts. Waits for the device."""
        state = super().state_dict()
        return {**state, STEPS: self._steps, SKIPPED: int(self._skipped)} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this scaler or of torch's."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._steps, self._skipped = state_dict.get(STEPS, 0), state_dict.get(SKIPPED, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_skipped": int(self._skipped)}  # no tensor, as torch does with the scale

    @property
    def statistics(self) -> ScalerStatistics:
        """The number of optimizer steps, how many were skipped, and the scale. Waits for the device."""
        return ScalerStatistics(self._steps, int(self._skipped), self.get_scale())

    def _count(self, flags: list[torch.Tensor]) -> None:
        """Counts one step of one optimizer. `flags`: its found_inf on each device that holds gradients."""
        self._steps += 1
        if flags:  # summed on one device, the same at every step
            device = flags[0].device if self._scale is None else self._scale.device
            found = torch.stack([flag.reshape(()).to(device) > 0 for flag in flags])
            self._skipped = self._skipped + found.any().int()
