"""Output of the command line, as text or one JSON object: data on stdout, everything else on stderr."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kitsune.base import json_logging
from kitsune.base.byte_sizes import size_words
from kitsune.base.text_format import clean, factor, step_time
from kitsune.cli.exit_codes import ExitCode
from kitsune.errors import UnfitError
from kitsune.knobs import KNOBS
from kitsune.long_proof import LongProof
from kitsune.plan import Environment, Evidence, Interval, Plan

PIPED_WIDTH: Final = 140  # when stdout is not a terminal
#: Shown instead of an interval when the plan is its own baseline.
ITSELF: Final = "is the baseline"
#: Inconclusive verdict -> how the sentence with the reason begins.
UNTOLD: Final[Mapping[str, str]] = {"ambiguous": "Undecided", "too_noisy": "Too noisy to tell"}

log = logging.getLogger("kitsune")


class Stdout(Console):
    """A console whose `print` raises UnfitError when stdout cannot be written."""

    def print(self, *objects: Any, **options: Any) -> None:
        with _written():
            super().print(*objects, **options)


def stdout() -> Console:
    return _console(Stdout, is_stderr=False)


def stderr() -> Console:
    return _console(Console, is_stderr=True)


def _console(kind: type[Console], *, is_stderr: bool) -> Console:
    """rich itself turns colours off for NO_COLOR, for TERM=dumb and without a terminal."""
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return kind(stderr=is_stderr, markup=False, highlight=False, emoji=False, width=width)


def emit(value: dict[str, Any]) -> None:
    """Prints the JSON object of a command on stdout: indented on a terminal, else on one line.

    Raises UnfitError when stdout cannot be written.
    """
    with _written():
        sys.stdout.write(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """Turns a failed write to stdout (full disk, closed pipe) into an UnfitError, and discards what is buffered."""
    try:
        yield
    except OSError as error:
        _abandon_stdout()
        raise UnfitError(_write_failure("the result", error)) from error


def fail_help(error: OSError) -> int:
    """Reports that the help could not be written to stdout; returns the exit code."""
    _abandon_stdout()
    return fail(UnfitError.__name__, _write_failure("the help", error), ExitCode.UNFIT, as_json=False)


def _write_failure(what: str, error: OSError) -> str:
    return f"{what} cannot be written to stdout: {error.strerror or error}"


def _abandon_stdout() -> None:
    """Redirects stdout to the null device: Python flushes the buffer at exit, which would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def ensure_streams() -> None:
    """Reopens streams that the caller has closed (`>&-`): stdout read-only, so that writes fail; stderr discards them.

    Otherwise a file opened later, such as the database, could get descriptor 1 or 2, and a child would print into it.
    """
    if sys.stdout is None:
        sys.stdout = _opened_as(1, os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _opened_as(2, os.O_WRONLY)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Redirects what user code prints in the block to stderr, also from C, since it is no result of the command."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _opened_as(descriptor: int, flags: int) -> TextIO:
    nowhere = os.open(os.devnull, flags)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def note(text: str) -> None:
    """Prints a line on stderr that is not part of the result."""
    if json_logging.is_json():
        log.info(text)
        return
    stderr().print(clean(text), soft_wrap=True)


def fail(kind: str, message: str, code: int, *, as_json: bool) -> int:
    """Reports an error on stderr, with `as_json` also as the JSON object on stdout; returns the code."""
    if as_json:
        with contextlib.suppress(UnfitError):  # without a stdout, this error is still reported on stderr
            emit({"error": {"type": kind, "message": message, "exit_code": int(code)}})
    if json_logging.is_json():
        log.error("%s: %s", kind, message)
        return int(code)
    stderr().print(Text("Error: ", style="bold red") + Text(clean(message)), soft_wrap=True)
    return int(code)


def table(*columns: str, rows: Iterable[Iterable[str]], right: frozenset[str] = frozenset()) -> Table:
    """A table without a frame. Columns named in `right` are right-aligned and do not wrap."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in right, overflow="fold"
        )
    for row in rows:
        made.add_row(*map(clean, row))
    return made


def facts(rows: Iterable[Iterable[str]]) -> Table:
    """A table of names and values, without a header."""
    made = table("name", "value", rows=rows)
    made.show_header = False
    return made


def spread(interval: Interval, to: str = "-") -> str:
    return ITSELF if interval.is_itself else f"{interval.low:.2f}{to}{interval.high:.2f}"


def headline(plan: Plan) -> str:
    """The result in one sentence."""
    found = plan.evidence
    if found is None:
        return "Written by hand: nothing about it was measured."
    if found.verdict == "faster":
        over_eager = "" if found.baseline == "eager" else f"; {factor(found.speedup_over_eager.median)} over eager"
        return (
            f"{factor(found.speedup.median)} faster than the best stock configuration ({_stock(found)}), "
            f"95 % interval {spread(found.speedup)}{over_eager}.{_noted(found)}"
        )
    if found.verdict == "fits":
        return f"It fits: {_fitted(found)}."
    if found.verdict in UNTOLD:
        return f"{UNTOLD[found.verdict]}: {found.note}. {_kept(plan, found)}"
    if plan.knobs:
        return (
            f"No gain found over the best stock configuration ({found.baseline}): the plan is that configuration, "
            f"{factor(found.speedup_over_eager.median)} faster than the step as given.{_noted(found)}"
        )
    return f"No gain found: keep your baseline.{_noted(found)}"


def _fitted(found: Evidence) -> str:
    return (
        f"{size_words(found.peak_bytes)} at peak, {step_time(found.step_ms)} ms a step; {found.note}, and "
        f"{step_time(found.eager_step_ms)} ms"
    )


def _noted(found: Evidence) -> str:
    return f" Note: {found.note}." if found.note else ""


def _kept(plan: Plan, found: Evidence) -> str:
    if plan.knobs:
        return f"Until then the plan is the best stock configuration ({found.baseline})."
    return "Until then the plan changes nothing."


def _stock(found: Evidence) -> str:
    return "the step as given, eager" if found.baseline == "eager" else found.baseline


def plan_screen(plan: Plan) -> list[Any]:
    """The choices, environment and evidence of a plan, as parts for `Console.print`."""
    parts: list[Any] = [headline(plan), ""]
    if plan.knobs:
        chosen = [(knob, plan.knobs[name]) for name, knob in KNOBS.items() if name in plan.knobs]
        rows = [(knob.name, str(choice), knob.choices[choice]) for knob, choice in chosen]
        parts.append(table("knob", "choice", "what it does", rows=rows))
    else:
        parts.append("The plan changes nothing: the step runs unmodified.")
    parts += ["", facts([*_facts(plan), ("plan", plan.plan_id)])]
    return parts


def _facts(plan: Plan) -> Iterable[tuple[str, str]]:
    if plan.evidence is not None:
        yield from _measured(plan.evidence)
    if plan.environment is not None:
        yield "holds for", machine(plan.environment)
    if plan.fingerprint:
        yield "workload", plan.fingerprint


def _measured(found: Evidence) -> Iterable[tuple[str, str]]:
    baseline = "as given" if found.verdict == "fits" else "best stock configuration"
    times = f"{step_time(found.step_ms)} ms; {baseline} {step_time(found.baseline_step_ms)} ms"
    blocks = f"{found.blocks} blocks each, in {found.processes} process{'' if found.processes == 1 else 'es'}"
    yield "step", f"{times} ({blocks}); as given {step_time(found.eager_step_ms)} ms"
    if found.prediction is not None:
        again = f"{factor(found.prediction.low)} to {factor(found.prediction.high)}"
        yield "measured again", f"between {again} as fast 95 % of the time, in one more process of this machine"
    if found.peak_bytes or found.baseline_peak_bytes:
        limit = f"; limit {size_words(found.memory_limit_bytes)}" if found.memory_limit_bytes else ""
        memory = f"{size_words(found.peak_bytes)} at peak; {baseline} {size_words(found.baseline_peak_bytes)}"
        yield "memory", memory + limit
    else:
        yield "memory", "not counted on a CPU"
    numbers = found.numerics
    yield (
        "numbers",
        numbers.note
        or f"gradients off by {numbers.gradient_error:.1e} ({numbers.gradient_allowed:.1e} allowed), "
        f"parameters by {numbers.parameter_error:.1e} ({numbers.parameter_allowed:.1e})",
    )
    if found.proof is not None:
        yield "proof", _proof_summary(found.proof)
    yield "first step", f"{found.first_step_s:.1f} s{_break_even(found)}"


def _proof_summary(proof: LongProof) -> str:
    steps = f"{proof.steps} settled steps, {proof.restarts} beside a reference, {proof.updates} updates in float64"
    return f"{steps}; nearest to its limit: {proof.nearest}" if proof.nearest else steps


def _break_even(found: Evidence) -> str:
    saved_ms = found.eager_step_ms - found.step_ms
    return f", earned back after {found.first_step_s * 1000 / saved_ms:,.0f} steps" if saved_ms > 0 else ""


def machine(environment: Environment) -> str:
    software = [f"torch {environment.torch}"]
    software += [f"{name} {value}" for name in ("cuda", "triton", "driver") if (value := getattr(environment, name))]
    return f"{environment.gpu} ({', '.join(software)})"
