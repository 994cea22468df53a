"""Report: what became of a plan: applied, or declined with its reason."""

from dataclasses import dataclass, field

from kitsune.knobs import Choice


@dataclass(slots=True)
class Report:
    """`applied`: knob -> choice; `declined`: knob -> reason; `notes`: what else is worth knowing.

    `peak_bytes` is the most device memory in tensors while the step was captured, 0 when it was not.
    """

    applied: dict[str, Choice] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peak_bytes: int = 0

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        lines = [f"applied   {knob} = {choice}" for knob, choice in self.applied.items()]
        lines += [f"declined  {knob}: {reason}" for knob, reason in self.declined.items()]
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join(lines) or "plain: the step runs as given"
