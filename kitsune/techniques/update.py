"""update: torch's foreach or fused implementation of the user's optimizer, or Kitsune's kernel for AdamW."""

import torch
from torch.optim import Adam

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, raised_in
from kitsune.update.adamw import KernelUpdate
from kitsune.update.optimizer_flags import Switch, given_groups


class UpdateImplementation(Technique):
    name = "update"
    fails_half_updated = True

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if choice != "kitsune" and choice not in facts.optimizer_options:
            return f"{facts.optimizer} has no {choice} implementation"
        if facts.optimizer_chosen is not None:
            return f"the optimizer was built with {facts.optimizer_chosen}, and the user's choice is kept"
        if choice == "kitsune":
            return why_not_kitsune(facts)
        if choice == "fused" and not facts.parameter_dtypes <= FUSED_DTYPES:
            return "the fused implementation needs floating-point parameters"
        if choice == "fused" and facts.sparse_gradients:
            return "the fused implementation does not take sparse gradients"
        if choice == "foreach" and facts.tensor_rate:
            return "the foreach implementation does not take a learning rate in a tensor"
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        """Sets the flags of all groups, but not in checkpoints: `state_dict` keeps the user's flags."""
        flags = {"foreach": choice == "foreach", "fused": choice != "foreach"}
        known = {flag: value for flag, value in flags.items() if flag in build.optimizer.defaults}
        switch = Switch(build.optimizer, known)
        build.undo.callback(switch.undo)
        if choice == "kitsune" and isinstance(build.optimizer, Adam):  # `fused` puts its step counters on the device
            build.undo.callback(KernelUpdate(build.optimizer).undo)

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, "/torch/optim/")


def why_not_kitsune(facts: Facts) -> str | None:
    if facts.update_kernel is not None:
        return facts.update_kernel
    if facts.sparse_gradients:
        return "Kitsune's kernel does not take sparse gradients"
    return "Kitsune's kernels need a GPU" if facts.device != "cuda" else facts.compiler


FUSED_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


def implementations(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The implementation flags that an optimizer has."""
    return tuple(flag for flag in ("foreach", "fused", "capturable") if flag in optimizer.defaults)


def chosen_by_hand(optimizer: torch.optim.Optimizer) -> str | None:
    """The implementation that the user set explicitly, or None. Flags that an active plan has set do not count."""
    for group in given_groups(optimizer):
        for flag in ("foreach", "fused"):
            if group.get(flag) is not None:
                return f"{flag}={group[flag]}"
    return None


TECHNIQUE = UpdateImplementation()
