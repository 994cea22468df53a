"""The cases of the benchmarks: what their names promise is what they measure; and how they are called."""

import importlib
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

import benchmarks
from benchmarks import flags
from benchmarks.cases import CASES, FORWARDS
from benchmarks.results_file import command_line
from tuner.workloads.loader import check_spec
from tuner.zoo import ZOO
from tuner.zoo.recipe import Tokens

ALL = CASES | FORWARDS


PROGRAMS = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_loads(name: str) -> None:
    """No other test loads all of them, and what they import may have moved."""
    importlib.import_module(f"benchmarks.{name}")


def test_a_set_of_flags_that_this_torch_lacks_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {flags.DEFAULT: {}, "known": {"combo_kernels": True}, "gone": {"combo_kernels": True, "no_such_flag": 1}}
    monkeypatch.setattr(flags, "SETS", sets)
    assert set(flags.sets_here(sets)) == {flags.DEFAULT, "known"}
    assert "gone is left out" in capsys.readouterr().err


def told(spec: str) -> str:
    """MODEL/BATCH or MODEL/BATCHxSEQ of a workload of the zoo."""
    name, _, query = spec.removeprefix("zoo:").partition("?")
    data = ZOO[name].base.resized({option: int(value) for option, value in parse_qsl(query)}).data
    return f"{name}/{data.batch}x{data.seq}" if isinstance(data, Tokens) else f"{name}/{data.batch}"


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.spec.startswith("zoo:")])
def test_the_name_of_a_case_tells_model_and_batch(name: str) -> None:
    assert name.removesuffix("-forward") == told(ALL[name].spec)


@pytest.mark.parametrize("name", ALL)
def test_the_workload_of_a_case_exists(name: str) -> None:
    check_spec(ALL[name].spec)


@pytest.mark.parametrize("name", ALL)
def test_a_forward_is_called_one_and_is_no_training_step(name: str) -> None:
    assert ALL[name].is_forward == name.endswith("-forward") == (name not in CASES)


def test_the_command_of_a_result_file_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "/home/me/kitsune/benchmarks/engine.py",
        "--case",
        "resnet50/8",
        "--out",
        "/home/me/engine.jsonl",
        "--plan",
        "p/plan.json",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert command_line() == "python -m benchmarks.engine --case resnet50/8 --out engine.jsonl --plan p/plan.json"
