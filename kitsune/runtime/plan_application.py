"""Which parts of a plan apply here, and why the others do not."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from kitsune.base.environment import is_disabled
from kitsune.device.backend import environment, first_line
from kitsune.errors import DeclinedError, SettingsError
from kitsune.knobs import KNOBS, Choice, clashes
from kitsune.plan import Match, Plan
from kitsune.runtime.report import Report
from kitsune.techniques import TECHNIQUES, Build, Facts, why_not

OnDecline = Literal["eager", "raise"]


class Assembly:
    """What is left of a plan on this machine, for this model. A knob that was declined is not tried again."""

    def __init__(self, plan: Plan | None, facts: Facts, device: torch.device, on_decline: OnDecline) -> None:
        if on_decline not in ("eager", "raise"):
            raise SettingsError(f"on_decline is {on_decline!r}; use 'eager' or 'raise'")
        self.device = device
        self.report = Report()
        self.knobs: dict[str, Choice] = dict(plan.knobs) if plan is not None else {}
        self._raises = on_decline == "raise" and not is_disabled()
        self._refusal = refused(plan, device, self.report)
        self.check(facts)

    @contextlib.contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """If the block fails although it has declined a knob, the knob was not the cause: it is put back."""
        choices = dict(self.knobs), dict(self.report.applied), dict(self.report.declined)
        try:
            yield
        except DeclinedError:
            raise
        except Exception:
            self.knobs, self.report.applied, self.report.declined = choices
            raise

    def check(self, facts: Facts) -> None:
        """Declines what cannot be applied to a workload of these facts."""
        reasons = {name: self._refusal or why_not(name, choice, facts) for name, choice in self.knobs.items()}
        self._take_out({name: reason for name, reason in reasons.items() if reason is not None})

    def decline(self, knob: str, reason: str) -> None:
        """Takes the knob out of the plan, and what needs it. Raises DeclinedError with `on_decline="raise"`."""
        self._take_out({knob: reason})

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

    def splits_loss(self) -> bool:
        """Whether the forward of the model is taken by itself, with the loss outside of it."""
        return any(TECHNIQUES[name].splits_loss(choice) for name, choice in self.knobs.items())

    def blamed(self, error: BaseException) -> tuple[str, str] | None:
        """The knob that caused an error of the step, and the reason: the first of the table that recognises the error.

        The later ones, compile and capture, wrap what the earlier ones raise.
        """
        if isinstance(error, DeclinedError):  # by what the technique has put into the step
            return (error.knob, error.reason) if error.knob in self.knobs else None
        applied = (name for name in TECHNIQUES if name in self.knobs)
        knob = next((name for name in applied if TECHNIQUES[name].blames(error)), None)
        return None if knob is None else (knob, first_line(error))


def refused(plan: Plan | None, device: torch.device, report: Report) -> str | None:
    """Why nothing of the plan may be applied here, or None. A plan of a similar environment gets a note."""
    if is_disabled():
        return "KITSUNE_DISABLE is set"
    if plan is None or plan.environment is None:
        return None
    match, reason = plan.environment.match(environment(device))
    if match is Match.COMPATIBLE:
        report.note(f"the plan was {reason}")
    return f"the plan was {reason}" if match is Match.REFUSED else None
