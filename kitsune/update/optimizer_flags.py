"""Flags: which implementation of an optimizer runs, set for the time of a plan, and what its owner had set."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import torch

SWITCHES: Final = "_kitsune_switches"  # of an optimizer; neither copies nor pickles of it have them


class Switch:
    """Other implementation flags for an optimizer that exists, with its checkpoints as before.

    Step counters move to the device where the new flags need it, and back; a loaded checkpoint gets the flags again.
    A second switch on the same optimizer, as of a step that is built anew in a notebook, knows of the first one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flags: dict[str, bool]) -> None:
        self.optimizer = optimizer
        self.flags = flags
        self.moves_steps = not flags.keys().isdisjoint({"fused", "capturable"})
        self.given = self._read()
        vars(optimizer)[SWITCHES] = [*switches_of(optimizer), self]
        self.scaling = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._hide),
            optimizer.register_load_state_dict_post_hook(self._take),
        ]
        # torch warns once when a capturable optimizer runs uncaptured; warming up does so on purpose
        optimizer._warned_capturable_if_run_uncaptured = True
        self._set()

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        vars(self.optimizer)[SWITCHES] = [one for one in switches_of(self.optimizer) if one is not self]
        for group, given in zip(self.optimizer.param_groups, self.given, strict=False):
            group.update(given)
        if self.scaling is None:
            self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        self._move_steps()

    def _read(self) -> list[dict[str, Any]]:
        older = list(takewhile(lambda one: one is not self, switches_of(self.optimizer)))
        groups = as_before(self.optimizer.param_groups, older)
        return [{flag: group.get(flag) for flag in self.flags} for group in groups]

    def _take(self, _: torch.optim.Optimizer) -> None:
        """After a checkpoint was loaded: its flags are the user's now."""
        self.given = self._read()
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(self.flags)
        if self.flags.get("fused"):
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._move_steps()

    def _move_steps(self) -> None:
        if not self.moves_steps:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(_step_device(group, parameter), torch.float32)

    def _hide(self, _: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        """The checkpoint as the user's own optimizer would have written it."""
        checkpoint["param_groups"] = groups = as_before(checkpoint["param_groups"], [self])
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        if self.moves_steps and not on_device:
            checkpoint["state"] = {key: _with_host_step(state) for key, state in checkpoint["state"].items()}


def _with_host_step(state: Any) -> Any:
    if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor):
        return {**state, "step": state["step"].cpu()}
    return state


def _step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where torch.optim keeps the step counter of a parameter under the flags of its group."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def switches_of(optimizer: torch.optim.Optimizer) -> list[Switch]:
    """Those in force, the oldest first."""
    found: list[Switch] = vars(optimizer).get(SWITCHES, [])
    return found


def given_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of the optimizer as its owner set them, whatever plans are in force."""
    return as_before(optimizer.param_groups, switches_of(optimizer))


def as_before(groups: Sequence[Mapping[str, Any]], switches: Sequence[Switch]) -> list[dict[str, Any]]:
    """The groups as they were before the first of these switches; one that was added since is as it is."""
    given = [dict(group) for group in groups]
    for switch in reversed(switches):
        for group, flags in zip(given, switch.given, strict=False):
            group.update(flags)
    return given
