"""Assembly: a plan becomes changes to a step, part by part, each applied or declined with its reason."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import torch

from kitsune.base.environment import is_disabled
from kitsune.device.backend import environment
from kitsune.errors import DeclinedError, SettingsError
from kitsune.knobs import KNOBS, Choice, clashes
from kitsune.launches.planning.analysis import in_words
from kitsune.launches.plans import Planned
from kitsune.plan import Match, Plan
from kitsune.runtime.report import Report
from kitsune.techniques import TECHNIQUES, Build, Facts, why_not

if TYPE_CHECKING:  # loads Triton, which is not everywhere
    from kitsune.fusion import FusionEngine

OnDecline = Literal["eager", "raise"]


class Assembly:
    """What is left of a plan on this machine, for this model. Declining is final: a choice is tried once."""

    def __init__(self, plan: Plan | None, facts: Facts, device: torch.device, on_decline: OnDecline) -> None:
        if on_decline not in ("eager", "raise"):
            raise SettingsError(f"on_decline is {on_decline!r}; use 'eager' or 'raise'")
        self.device = device
        self.report = Report()
        self.knobs: dict[str, Choice] = dict(plan.knobs) if plan is not None else {}
        self._fusion: FusionEngine | None = None
        self._raises = on_decline == "raise" and not is_disabled()
        self._refusal = refused(plan, device, self.report)
        self.check(facts)

    @contextlib.contextmanager
    def unless_blameless(self, assemble: Callable[[], None]) -> Iterator[None]:
        """What the block declines is put back, and assembled anew, where it fails all the same."""
        choices = dict(self.knobs), dict(self.report.applied), dict(self.report.declined)
        try:
            yield
        except DeclinedError:
            raise
        except Exception:  # without the knob, too: it was not to blame
            self.knobs, self.report.applied, self.report.declined = choices
            assemble()
            raise

    def check(self, facts: Facts) -> None:
        """Declines what cannot be applied to a workload of these facts."""
        reasons = {name: self._refusal or why_not(name, choice, facts) for name, choice in self.knobs.items()}
        self._take_out({name: reason for name, reason in reasons.items() if reason is not None})

    def decline(self, knob: str, reason: str) -> None:
        """Takes the knob out of the plan, and what needs it. Raises DeclinedError when the caller asked for that."""
        self._take_out({knob: reason})

    def go_on_without(self, knob: str, reason: str, assemble: Callable[[], None]) -> None:
        """`decline`, and what is left assembled anew, also when the caller wants to hear of it by a DeclinedError."""
        try:
            self.decline(knob, reason)
        finally:
            assemble()

    def _take_out(self, reasons: Mapping[str, str]) -> None:
        declined = dict(reasons)
        for name in declined:
            self.knobs.pop(name, None)
        while (clash := next(clashes(self.knobs), None)) is not None:
            knob, exclusion = clash
            other = self.knobs.get(exclusion.other, KNOBS[exclusion.other].default)
            declined[knob.name] = f"{exclusion.other}={other}: {exclusion.reason}"
            del self.knobs[knob.name]
        for name in declined:
            self.report.applied.pop(name, None)
        self.report.declined.update(declined)
        if self._raises and declined:
            raise DeclinedError(*next(iter(declined.items())))

    def apply(self, build: Build) -> None:
        """Applies what is left, in the order of the knobs table; `build.undo` takes it back."""
        for name, technique in TECHNIQUES.items():
            if name in self.knobs:
                technique.apply(self.knobs[name], build)
                self.report.applied[name] = self.knobs[name]
        self._fusion = build.fusion

    def show_fusion(self) -> None:
        """Puts into the report what was fused so far."""
        self.report.fusion = self._fusion.get_fusion_stats() if self._fusion is not None else None

    def culprit(self, error: BaseException) -> str | None:
        """The applied knob that an error of the step is to be blamed on: the first of the table that owns up to it.

        The later ones, compile and capture, wrap what the earlier ones raise.
        """
        applied = (name for name in TECHNIQUES if name in self.knobs)
        return next((name for name in applied if TECHNIQUES[name].blames(error)), None)


def show_plan(report: Report, plan: Planned | None, part: str = "") -> None:
    """Puts into the report how launches were planned; `part` names those of less than the step."""
    report.picture = plan
    report.planned = f"{part}{in_words(plan.costs_us, plan.schedule)}; {plan.name}" if plan is not None else ""


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
