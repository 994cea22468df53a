"""Assembly: a plan becomes changes to a step, part by part, each applied or declined with its reason."""

from typing import Literal

import torch

from kitsune.device import environment
from kitsune.errors import DeclinedError, SettingsError
from kitsune.knobs import Choice, clashes
from kitsune.plan import Match, Plan
from kitsune.report import Report
from kitsune.switch import is_disabled
from kitsune.techniques import TECHNIQUES, Build, Facts, why_not

OnDecline = Literal["eager", "raise"]


class Assembly:
    """What is left of a plan on this machine, for this model. Declining is final: a choice is tried once."""

    def __init__(self, plan: Plan | None, facts: Facts, device: torch.device, on_decline: OnDecline) -> None:
        if on_decline not in ("eager", "raise"):
            raise SettingsError(f"on_decline is {on_decline!r}; use 'eager' or 'raise'")
        self.device = device
        self.report = Report()
        self.knobs: dict[str, Choice] = dict(plan.knobs) if plan is not None else {}
        self._raises = on_decline == "raise" and not is_disabled()
        self._refusal = refused(plan, device, self.report)
        self.check(facts)

    def check(self, facts: Facts) -> None:
        """Declines what cannot be applied to a workload of these facts."""
        for name, choice in list(self.knobs.items()):
            reason = self._refusal or why_not(name, choice, facts)
            if reason is not None:
                self.decline(name, reason)
        for knob, exclusion in list(clashes(self.knobs)):
            if knob.name in self.knobs:
                self.decline(knob.name, f"{exclusion.other}={self.knobs[exclusion.other]}: {exclusion.reason}")

    def decline(self, knob: str, reason: str) -> None:
        """Takes the knob out of the plan. Raises DeclinedError when the caller asked for that."""
        self.knobs.pop(knob, None)
        self.report.applied.pop(knob, None)
        self.report.declined[knob] = reason
        if self._raises:
            raise DeclinedError(knob, reason)

    def apply(self, build: Build) -> None:
        """Applies what is left, in the order of the knobs table; `build.undo` takes it back."""
        for name, technique in TECHNIQUES.items():
            if name in self.knobs:
                technique.apply(self.knobs[name], build)
                self.report.applied[name] = self.knobs[name]

    def culprit(self, error: BaseException) -> str | None:
        """The applied knob that an error of the step is to be blamed on: the first of the table that owns up to it.

        The later ones, compile and capture, wrap what the earlier ones raise.
        """
        applied = (name for name in TECHNIQUES if name in self.knobs)
        return next((name for name in applied if TECHNIQUES[name].blames(error)), None)


def refused(plan: Plan | None, device: torch.device, report: Report) -> str | None:
    """Why nothing of the plan may be applied here, or None. A plan of a near-by environment gets a note."""
    if is_disabled():
        return "KITSUNE_DISABLE is set"
    if plan is None or plan.environment is None:
        return None
    match, reason = plan.environment.match(environment(device))
    if match is Match.COMPATIBLE:
        report.note(f"the plan was {reason}")
    return f"the plan was {reason}" if match is Match.REFUSED else None
