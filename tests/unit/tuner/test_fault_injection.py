"""Fault injection: syntax, when faults occur, and the effect of those around a child."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune.cli import main
from kitsune.errors import SettingsError
from tuner import fault_injection
from tuner.fault_injection import Fault, parsed


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    yield
    fault_injection.plant(())


def plant(text: str) -> None:
    fault_injection.plant(parsed(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" , ", ()),
        ("scratch-full", (Fault(name="scratch-full"),)),
        ("child-kill=timing@3", (Fault(name="child-kill", value="timing", first=3),)),
        ("database-full@5+, gpu-sick", (Fault(name="database-full", first=5, is_lasting=True), Fault(name="gpu-sick"))),
        ("clock-ahead=-3600", (Fault(name="clock-ahead", value="-3600", is_lasting=True),)),
    ],
)
def test_valid_faults_are_parsed(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "text", ["disk-on-fire", "scratch-full@0", "scratch-full=3", "clock-ahead", "clock-ahead=soon", "child-kill", "@2"]
)
def test_invalid_faults_are_refused_with_advice(text):
    with pytest.raises(SettingsError, match="KITSUNE_FAULTS holds"):
        parsed(text)


def test_a_command_says_so(capsys, monkeypatch):
    monkeypatch.setenv("KITSUNE_FAULTS", "disk-on-fire")
    assert main.run(["worker", "--once", "--device", "cpu"]) == 2
    assert "a fault is NAME" in capsys.readouterr().err


def test_a_fault_occurs_at_the_nth_call_and_is_logged(caplog):
    plant("gpu-sick@2, heart-stop@2+")
    assert [bool(fault_injection.struck("gpu-sick")) for _ in range(4)] == [False, True, False, False]
    assert [bool(fault_injection.struck("heart-stop")) for _ in range(4)] == [False, True, True, True]
    assert not fault_injection.struck("database-full")
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "planted fault gpu-sick strikes, at the 2. time"
    fault_injection.plant(())
    assert not fault_injection.struck("heart-stop")


def test_each_is_told_of_on_the_page():
    page = Path("docs/reliability.md").read_text()
    assert [name for name in fault_injection.KINDS if f"| `{name}" not in page] == []
