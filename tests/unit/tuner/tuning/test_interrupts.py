"""Ctrl-C at every place where a run may be: what it found is not lost, and a second one ends it at once."""

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from kitsune.cli import signals
from kitsune.errors import NoTrialError
from tests.unit.tuner.machine import CLOSE, GRAPH_WINS, SMALL, Machine, a_run, is_playoff
from tests.unit.tuner.sample_run import BF16, INSPECTED, RUN, TRIALS
from tuner import api
from tuner.api import tune_workload
from tuner.records import RunStatus, Source
from tuner.search.proposal import Proposal
from tuner.search.strategy import propose
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.events import Ablating, Confirming, Event, Explaining, Inspected, PlayingOff, Started, Tried, Trying
from tuner.tuning.interrupts import AFRESH, NOTHING, STAYS, Interrupts
from tuner.tuning.run import Tuning

SEARCHING = Trying(0, 2, Proposal({}, Source.BASELINE))


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # the handler runs in the main thread, between two of its instructions


@dataclass
class Pressed:
    """Ctrl-C at the `number`-th time that an event of this kind is told, in the very call."""

    kind: type[Event]
    number: int = 1
    times: int = 1

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.number -= 1
            for _ in range(self.times if self.number == 0 else 0):
                press()


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/k.db"


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, ablates=True)
    monkeypatch.setattr(api, "Tuning", made.make)
    return made


def tuned(url: str, tell, trials: int = 12):
    said: list[str] = []
    with Interrupts(tell, said.append).installed() as interrupts:
        options = {"device": "cpu", "trials": trials, "database": url}
        result = tune_workload("zoo:mlp", tell=interrupts.tell, interrupts=interrupts.counted, **options)
    return result, said


def only_run(url: str):
    with open_database(url) as database, database.read() as connection:
        (run,) = runs.page(connection).runs
        return run, trials.list_of(connection, run.id)


# Between two trials ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [Pressed(Tried, 1), Pressed(Tried, 4), Pressed(Trying, 3), Pressed(PlayingOff), Pressed(Confirming)],
    ids=lambda at: f"{at.kind.__name__}-{at.number}",
)
def test_an_interrupt_while_an_event_is_told_gives_the_best_so_far(at, url, machine):
    machine.step_ms, machine.drift = CLOSE, 0.2  # so that the best play off
    result, said = tuned(url, at, trials=24)
    assert said == [AFRESH]
    assert result.interrupted
    assert result.run.status is RunStatus.FINISHED
    sources = {trial.source for trial in result.trials}
    assert (Source.CONFIRM in sources) == (sources != {Source.BASELINE}), "that alone is the answer"
    assert Source.ABLATION not in sources


def test_an_interrupt_while_the_next_trial_is_chosen(url, machine, monkeypatch):
    def interrupted(space, tried, *rest, **options):
        if len(tried) == 3:
            press()
        return propose(space, tried, *rest, **options)

    monkeypatch.setattr("tuner.planning.next_trial.propose", interrupted)
    result, said = tuned(url, lambda _: None)
    assert (said, result.interrupted, result.run.status) == ([AFRESH], True, RunStatus.FINISHED)


def test_an_interrupt_while_a_trial_is_stored(url, machine, monkeypatch):
    add = trials.add

    def interrupted(connection, run, trial):
        if trial.number == 2:
            press()
        add(connection, run, trial)

    monkeypatch.setattr(trials, "add", interrupted)
    result, said = tuned(url, lambda _: None)
    assert (said, result.interrupted, result.run.status) == ([AFRESH], True, RunStatus.FINISHED)
    assert len(result.trials) == 3 + PROCESSES


@pytest.mark.parametrize("kind", [Trying, Confirming])
def test_a_second_one_stops_at_once_wherever_it_comes(kind, url, machine):
    with pytest.raises(KeyboardInterrupt):
        tuned(url, Pressed(kind, times=2))
    run, tried = only_run(url)
    assert run.status is RunStatus.CANCELLED
    assert Source.CONFIRM not in {trial.source for trial in tried}


@pytest.mark.parametrize("kind", [Explaining, Ablating])
def test_an_interrupt_after_the_plan_leaves_it_as_it_is(kind, url, machine):
    result, said = tuned(url, Pressed(kind))
    assert said == [STAYS]
    assert (result.interrupted, result.run.status) == (True, RunStatus.FINISHED)
    assert words(result.plan.knobs)


@pytest.mark.parametrize("kind", [Started, Inspected])
def test_an_interrupt_before_there_is_anything_to_keep_leaves_no_run_behind(kind, url, machine):
    """The run is stored by then, as `running`: nobody else may wait for it."""
    inspect = machine.inspect

    def asking(job):
        """As waiting for a child does, asks whether to go on."""
        machine.check()
        return inspect(job)

    machine.inspect = asking
    with pytest.raises((KeyboardInterrupt, NoTrialError)):
        tuned(url, Pressed(kind))
    assert only_run(url)[0].status in (RunStatus.CANCELLED, RunStatus.FAILED)


def test_a_keyboard_interrupt_where_the_run_is_told_of_cancels_it(url, machine):
    """From a caller that handles SIGINT by itself."""

    def tell(event):
        if isinstance(event, Started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_workload("zoo:mlp", device="cpu", database=url, tell=tell)
    assert only_run(url)[0].status is RunStatus.CANCELLED


# While a child is waited for ------------------------------------------------------------------------------------------


def waiting(machine: Machine, number: int, presses: int):
    """In child `number` Ctrl-C is pressed, then it is asked whether to go on."""

    def answer(child, job):
        if child == number:
            for _ in range(presses):
                press()
            machine.check()

    return answer


def test_a_trial_is_ended_at_once(url, machine):
    machine.answer = waiting(machine, 5, presses=1)
    result, said = tuned(url, lambda _: None)
    assert (said, result.interrupted) == ([AFRESH], True)
    assert len(result.trials) == 5 + PROCESSES


def test_two_in_one_trial_end_the_run(url, machine):
    machine.answer = waiting(machine, 5, presses=2)
    with pytest.raises(KeyboardInterrupt):
        tuned(url, lambda _: None)
    assert only_run(url)[0].status is RunStatus.CANCELLED


def test_a_playoff_is_ended_at_once():
    machine = Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2)
    pressed = []

    def answer(_, job):
        if is_playoff(job):
            pressed.append(1)
            machine.check()

    machine.answer = answer
    made: Tuning = machine.make(run=a_run(budget_trials=24), spec="zoo:mlp", interrupts=lambda: len(pressed))
    told = list(made.steps())
    assert pressed == [1]
    assert made.interrupted
    assert Source.PLAYOFF not in {event.trial.source for event in told if isinstance(event, Tried)}


# The signal -----------------------------------------------------------------------------------------------------------


def heard(*events: Event, presses: int = 1) -> list[str]:
    said: list[str] = []
    with Interrupts(lambda _: None, said.append).installed() as interrupts:
        for event in events:
            interrupts.tell(event)
        for _ in range(presses):
            press()
    return said


def test_the_first_one_says_what_it_leads_to():
    assert heard(Started(RUN), INSPECTED) == []
    failed, measured = Tried(TRIALS[1]), Tried(TRIALS[0])
    assert heard(SEARCHING) == heard(SEARCHING, failed, SEARCHING) == [NOTHING]
    for events in (
        [SEARCHING, measured],
        [SEARCHING, measured, SEARCHING],
        [PlayingOff(({}, BF16))],
        [Confirming(BF16)],
    ):
        assert heard(*events) == [AFRESH]
    assert heard(SEARCHING, measured, Ablating(("precision",)), measured) == [STAYS]


def test_before_the_run_and_from_the_second_one_on_it_raises():
    with pytest.raises(KeyboardInterrupt):
        heard()
    with pytest.raises(KeyboardInterrupt):
        heard(SEARCHING, presses=2)


def test_a_terminal_that_takes_no_words_breaks_nothing():
    def gone(_):
        raise OSError(5, "Input/output error")

    with Interrupts(lambda _: None, gone).installed() as interrupts:
        interrupts.tell(SEARCHING)
        press()
    assert interrupts.count == 1


@pytest.mark.parametrize("before", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "the caller's own"])
def test_a_handler_of_the_caller_stays(before):
    usual = signal.signal(signal.SIGINT, before)
    try:
        with Interrupts(lambda _: None, lambda _: None).installed():
            assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, usual)


def test_the_handler_of_the_command_line_gives_way_and_comes_back():
    usual = signal.signal(signal.SIGINT, signals.interrupt)
    try:
        with Interrupts(lambda _: None, lambda _: None).installed():
            assert signal.getsignal(signal.SIGINT) is not signals.interrupt
        assert signal.getsignal(signal.SIGINT) is signals.interrupt
    finally:
        signal.signal(signal.SIGINT, usual)


def test_another_thread_than_the_first_hears_nothing():
    counts = []

    def tune():
        with Interrupts(lambda _: None, lambda _: None).installed() as interrupts:
            counts.append(interrupts.counted())

    thread = threading.Thread(target=tune)
    thread.start()
    thread.join()
    assert counts == [0]
