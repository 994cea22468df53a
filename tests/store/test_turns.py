"""Writers of one process: each in its turn, in the order of asking, and not for ever."""

import threading
from pathlib import Path
from shutil import copy

import pytest

from kitsune.errors import StoreBusyError
from tests.store.carrying import wait_until
from tuner.store.engine import open_database
from tuner.store.fair_lock import Turns


def test_turns_come_in_the_order_of_asking() -> None:
    turns, order = Turns(), []
    assert turns.take(0)

    def wait(number: int) -> None:
        assert turns.take(30)
        order.append(number)
        turns.end()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: turns.waiting == number)
    turns.end()
    for thread in threads:
        thread.join()
    assert order == [*range(8)]
    assert turns.take(0)


def test_nobody_overtakes_who_waits() -> None:
    turns, got = Turns(), threading.Event()
    assert turns.take(0)

    def wait() -> None:
        assert turns.take(30)
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: turns.waiting == 1)
    turns.end()
    assert not turns.take(0)  # it is the other's, whether that has woken up or not
    thread.join()
    assert got.is_set()


def test_who_gives_up_is_passed_over() -> None:
    turns = Turns()
    assert turns.take(0)
    assert not turns.take(0.01)
    assert turns.waiting == 0
    turns.end()
    assert turns.take(0)


def test_who_is_interrupted_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    def interrupted(_event: threading.Event, _timeout_s: float) -> bool:
        raise KeyboardInterrupt

    def just_as_its_turn_comes(event: threading.Event, timeout_s: float) -> bool:
        turns.end()
        return interrupted(event, timeout_s)

    for wait in (interrupted, just_as_its_turn_comes):
        assert turns.take(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                turns.take(1)
        if wait is interrupted:
            turns.end()
        assert turns.take(0)
        turns.end()


def test_a_writer_waits_for_another_of_its_process_and_says_when_it_gives_up(
    tmp_path: Path, empty_database: Path
) -> None:
    copy(empty_database, tmp_path / "kitsune.db")
    with open_database(f"sqlite:///{tmp_path}/kitsune.db", busy_timeout_s=0.05) as database:
        with database.begin(), pytest.raises(StoreBusyError, match="of this process"), database.begin():
            pass
        with database.begin(), database.read():
            pass  # readers wait for nobody
