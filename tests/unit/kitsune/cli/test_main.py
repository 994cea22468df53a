"""The base commands in this process, by `cli.run`; what only a process of its own shows, in one."""

import json
import os
import resource
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune import __version__, errors
from kitsune.base.text_format import clean, duration
from kitsune.cli import main, output
from kitsune.cli.doctor import Check, Status
from kitsune.cli.exit_codes import MEANINGS, ExitCode, code_of
from kitsune.device.backend import environment, pick_device
from kitsune.errors import KitsuneError
from kitsune.plan import Evidence, Interval, Numerics, Plan


def interval(median: float) -> Interval:
    return Interval(median=median, low=median * 0.98, high=median * 1.02)


def evidence(**changes: object) -> Evidence:
    errors_found = dict.fromkeys(("loss_error", "gradient_error", "parameter_error"), 1e-4)
    allowed = dict.fromkeys(("loss_allowed", "gradient_allowed", "parameter_allowed"), 1e-2)
    given = {
        "run_id": "run-1",
        "verdict": "faster",
        "baseline": "compile=reduce-overhead",
        "baseline_step_ms": 2.31,
        "step_ms": 1.0,
        "speedup": interval(2.31),
        "eager_step_ms": 11.2,
        "speedup_over_eager": interval(11.2),
        "baseline_peak_bytes": 2 * output.GIB,
        "peak_bytes": output.GIB,
        "first_step_s": 20.4,
        "blocks": 30,
        "samples_sha256": "0" * 64,
        "numerics": Numerics(steps=3, **errors_found, **allowed),
    }
    return Evidence(**{**given, **changes})


def measured_plan(**changes: object) -> Plan:
    return Plan(knobs={"precision": "bf16"}, environment=environment(pick_device("cpu")), evidence=evidence(**changes))


@pytest.fixture
def plan_file(tmp_path):
    def save(plan: Plan) -> str:
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


# Exit codes -----------------------------------------------------------------------------------------------------------


def tree(kind: type[KitsuneError] = KitsuneError) -> list[type[KitsuneError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in tree(child))]


#: What an error that takes more than a message is made of.
GIVEN: dict[type[KitsuneError], tuple[object, ...]] = {
    errors.ChartError: ("a bar", "is wrong"),
    errors.PlanError: ("knobs.x", "is wrong"),
    errors.DeclinedError: ("knobs.x", "is wrong"),
    errors.RefusedError: ("http://localhost:8537", 409, "it is so"),
}


def instance(kind: type[KitsuneError]) -> KitsuneError:
    return kind(*GIVEN.get(kind, ("it is so",)))


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_has_a_code_that_is_not_success(kind):
    code = code_of(instance(kind))
    assert code in set(MEANINGS) - {ExitCode.OK}
    if kind is not KitsuneError and code == ExitCode.UNEXPECTED:
        assert kind in (errors.MeasureError, errors.ChartError)  # a failed trial, a sentence on a page


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SettingsError, 2),
        (errors.UnfitError, 3),
        (errors.UnplannedError, 3),
        (errors.WorkloadError, 4),
        (errors.CaptureError, 4),
        (errors.ArchiveError, 4),
        (errors.ExportError, 4),
        (errors.PlanError, 4),
        (errors.BaselineError, 4),
        (errors.NotFoundError, 4),
        (errors.ConflictError, 4),
        (errors.NoTrialError, 5),
        (errors.UnreachableError, 6),
        (errors.RefusedError, 6),
        (errors.StoreBusyError, 11),
        (errors.SchemaError, 11),
    ],
)
def test_codes_are_stable(kind, code):
    assert code_of(instance(kind)) == code


def test_every_code_is_explained():
    assert set(MEANINGS) == set(ExitCode)


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_an_error_is_one_line_and_one_object(kind, call, monkeypatch):
    def fails() -> list[Check]:
        raise instance(kind)

    monkeypatch.setattr(main.doctor, "checks", fails)
    code, out, err = call("doctor", "--json")
    assert code == code_of(instance(kind))
    message = str(instance(kind))
    assert json.loads(out) == {"error": {"type": kind.__name__, "message": message, "exit_code": code}}
    assert err == f"Error: {message}\n"
    assert call("doctor") == (code, "", f"Error: {message}\n")


# Usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["tuna"], ["doctor", "--nope"], ["plan"], ["plan", "show"], ["plan", "show", "/no/file"]]
)
def test_misuse_is_told_with_the_way_to_the_help(words, call):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert "--help" in err
    assert "Error: " in err
    code, out, _ = call(*words, "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "UsageError")


def test_help_is_what_was_asked_for_so_it_is_data(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert "doctor" in out


def test_json_before_the_command_is_refused_rather_than_ignored(call):
    code, out, _ = call("--json", "doctor")
    assert code == 2
    assert "stands after the command" in json.loads(out)["error"]["message"]


def test_version_names_what_a_report_needs(call):
    code, out, _ = call("--version", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["kitsune"], found["torch"]) == (__version__, version("torch"))
    assert {"python", "cuda", "driver", "device"} <= set(found)
    assert f"kitsune {__version__}" in call("--version")[1].splitlines()


# Plans ----------------------------------------------------------------------------------------------------------------


def test_show_prints_the_plan_as_it_is_stored(call, plan_file):
    plan = measured_plan()
    code, out, err = call("plan", "show", plan_file(plan), "--json")
    assert (code, err) == (0, "")
    assert Plan.from_json(json.loads(out)) == plan


def test_show_says_in_words_what_was_found(call, plan_file):
    plan = measured_plan()
    _, out, _ = call("plan", "show", plan_file(plan))
    assert out.startswith(
        "2.31x faster than the best stock configuration (compile=reduce-overhead), 95 % interval 2.26-2.36; "
        "11.2x over eager.\n"
    )
    assert "autocast to bfloat16" in out
    assert "1.00 GiB at peak; best stock configuration 2.00 GiB" in out
    assert "earned back after 2,000 steps" in out
    assert plan.plan_id in out
    assert plan.environment.gpu in out


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan.by_hand(precision="bf16"), "Written by hand: nothing about it was measured."),
        (Plan(evidence=evidence(verdict="same", speedup=interval(1.0))), "No gain found: keep your baseline."),
        (
            Plan(knobs={"compile": "default"}, evidence=evidence(verdict="same", baseline="compile=default")),
            (
                "No gain found over the best stock configuration (compile=default): the plan is that configuration, "
                "11.2x faster than the step as given."
            ),
        ),
        (
            Plan(evidence=evidence(verdict="too_noisy", speedup=interval(1.0), note="baselines lie apart; be quiet")),
            "Too noisy to tell: baselines lie apart; be quiet. Until then the plan changes nothing.",
        ),
        (
            Plan(
                knobs={"compile": "default"},
                evidence=evidence(verdict="ambiguous", baseline="compile=default", note="one process cannot tell"),
            ),
            (
                "Undecided: one process cannot tell. "
                "Until then the plan is the best stock configuration (compile=default)."
            ),
        ),
        (
            Plan(knobs={"update": "foreach"}, evidence=evidence(baseline="eager", speedup=interval(1.25))),
            "1.25x faster than the best stock configuration (the step as given, eager), 95 % interval 1.23-1.27.",
        ),
        (
            Plan(
                knobs={"update": "foreach"},
                evidence=evidence(baseline="eager", speedup=interval(1.25), note="1 of 5 processes left out"),
            ),
            (
                "1.25x faster than the best stock configuration (the step as given, eager), 95 % interval 1.23-1.27. "
                "Note: 1 of 5 processes left out."
            ),
        ),
    ],
)
def test_the_headline_fits_the_verdict(plan, sentence):
    assert output.headline(plan) == sentence


def test_a_plan_that_was_tampered_with_is_refused(call, plan_file, tmp_path):
    path = tmp_path / plan_file(measured_plan())
    path.write_text(path.read_text().replace("2.31", "9.31"))
    code, out, err = call("plan", "show", str(path), "--json")
    assert code == 4
    assert json.loads(out)["error"]["type"] == "PlanError"
    assert "altered" in err


def test_check_compares_with_this_machine(call, plan_file):
    here = environment(pick_device("cpu"))
    plans = {
        "exact": Plan(environment=here),
        "compatible": Plan(environment=here.model_copy(update={"torch": "2.9.0"})),
        "refused": Plan(environment=here.model_copy(update={"gpu": "another"})),
    }
    for match, plan in plans.items():
        code, out, _ = call("plan", "check", plan_file(plan), "--device", "cpu", "--json")
        found = json.loads(out)
        assert (code, found["match"]) == (3 if match == "refused" else 0, match)
        assert found["plan_id"] == plan.plan_id
        assert found["reason"] == plan.environment.match(here)[1]
    assert call("plan", "check", plan_file(plans["refused"]), "--device", "cpu")[1].startswith(
        "refused: tuned on another"
    )


def test_a_plan_by_hand_fits_everywhere(call, plan_file):
    code, out, _ = call("plan", "check", plan_file(Plan.by_hand(update="foreach")))
    assert code == 0
    assert out.startswith("compatible: written by hand")


def test_check_on_a_device_that_is_not_there(call, plan_file):
    code, out, _ = call("plan", "check", plan_file(measured_plan()), "--device", "toaster", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (3, "UnfitError")


# Doctor ---------------------------------------------------------------------------------------------------------------

FINE = Check(name="python", status=Status.OK, detail="3.11")
POOR = Check(name="sqlite", status=Status.WARN, detail="old", fix="get a newer one")
BAD = Check(name="torch", status=Status.FAIL, detail="cannot be imported", fix="install it")


@pytest.mark.parametrize(("found", "code"), [([FINE, POOR], 0), ([FINE, POOR, BAD], 3)])
def test_doctor_fails_only_where_a_main_job_cannot_work(found, code, call, monkeypatch):
    monkeypatch.setattr(main.doctor, "checks", lambda: found)
    assert call("doctor", "--json")[:2] == (
        code,
        json.dumps({"fits": code == 0, "checks": [check.model_dump(mode="json") for check in found]}) + "\n",
    )
    ended, out, _ = call("doctor")
    assert ended == code
    assert all(check.detail in out and f"-> {check.fix}" in out for check in found if check.fix)


# Text -----------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_no_text_steers_a_terminal(text):
    cleaned = clean(text)
    assert len(cleaned) == len(text)
    assert all(c.isprintable() or c in "\n\t" for c in cleaned)
    assert clean(cleaned) == cleaned


@given(st.floats(min_value=0, max_value=1e5))
def test_a_duration_reads_as_the_seconds_that_it_was(seconds):
    parts = [int(part) for part in duration(seconds).split(":")]
    assert sum(part * 60**power for power, part in enumerate(reversed(parts))) == round(seconds)
    assert all(part < 60 for part in parts[1:])


def test_colours_follow_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.fail("X", "no [red]luck[/red]", 1, as_json=False)
    assert "\x1b[1;31mError: " in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    output.fail("X", "no [red]luck[/red]", 1, as_json=False)
    err = capsys.readouterr().err
    assert "31m" not in err
    assert "no [red]luck[/red]" in err


# The process ----------------------------------------------------------------------------------------------------------


def test_commands_of_a_package_that_does_not_load_are_left_out(call, monkeypatch, caplog):
    broken = EntryPoint(name="server", value="kitsune.no_such_module:register", group=main.GROUP)
    monkeypatch.setattr(main, "entry_points", lambda group: [broken])
    monkeypatch.setattr(main.doctor, "checks", lambda: [FINE])
    assert call("doctor")[0] == 0
    assert "the commands of server cannot be loaded" in caplog.text
    assert call("tune")[0] == 2


def python(code: str, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=150)


def cpu_s(code: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def test_help_is_quick_and_loads_nothing_heavy():
    """Within four times what its libraries take to load, which is 0.4 s on one machine and 0.7 on another."""
    code = (
        "import sys; from kitsune.cli import main as cli; done = cli.run(['tune', '--help']);"
        "heavy = {'torch', 'numpy', 'optuna', 'sqlalchemy', 'alembic'} & set(sys.modules); sys.exit(f'{done} {heavy}')"
    )
    ratios: list[float] = []
    while not ratios or (min(ratios) >= 4.0 and len(ratios) < 6):  # one that nobody disturbed is enough
        libraries_s, _ = cpu_s("import typer, rich.console, rich.table, pydantic")
        took_s, done = cpu_s(code)
        ratios.append(took_s / libraries_s)
        assert done.stderr == "0 set()\n"
        assert "--budget" in done.stdout
    assert min(ratios) < 4.0


BOOM = """
from kitsune.cli import main as cli
def boom(words): raise ZeroDivisionError("by zero\\nand more")
cli.run = boom
cli.main()
"""

WAIT = """
import os, signal
from kitsune.cli import main as cli
def wait(words):
    try:
        os.kill(os.getpid(), signal.SIGNAME)
        signal.pause()
    finally:
        print("cleaned up")
signal.signal(signal.SIGNAME, signal.SIG_DFL)
cli.run = wait
cli.main()
"""


def test_an_unforeseen_error_is_one_line_without_a_traceback():
    done = python(BOOM, "doctor", "--json")
    assert done.returncode == 1
    told = "unexpected ZeroDivisionError: by zero; run with --debug for the traceback"
    assert done.stderr == f"Error: {told}\n"
    assert json.loads(done.stdout)["error"] == {"type": "ZeroDivisionError", "message": told, "exit_code": 1}


def test_debug_shows_the_traceback_wherever_it_stands():
    done = python(BOOM, "doctor", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in boom" in done.stderr


CALLS = """
import sys
from kitsune.cli import main as cli, output as screen
from kitsune.errors import NotFoundError
def shows(words): screen.emit({"a": "b" * 20_000})
def prints(words): screen.stdout().print("b" * 20_000)
def fails(words): raise NotFoundError("it is not there")
cli.doctor.checks = lambda: CALL(None) or []
cli.main()
"""


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("shows", 3, "the result cannot be written to stdout: No space left on device"),
        ("prints", 3, "the result cannot be written to stdout: No space left on device"),
        ("fails", 4, "it is not there"),
    ],
)
@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line_and_a_code(call, code, told, words):
    with open("/dev/full", "wb") as full:
        done = python(CALLS.replace("CALL", call), *words, stdout=full)
    assert (done.returncode, done.stderr) == (code, f"Error: {told}\n")


def test_an_unforeseen_error_is_told_of_without_a_stdout():
    with open("/dev/full", "wb") as full:
        done = python(BOOM, "doctor", "--json", stdout=full)
    told = "unexpected ZeroDivisionError: by zero; run with --debug for the traceback"
    assert (done.returncode, done.stderr) == (1, f"Error: {told}\n")


def test_a_reader_that_left_is_one_line_and_a_code():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = python(CALLS.replace("CALL", "shows"), "doctor", stdout=gone)
    assert (done.returncode, done.stderr) == (3, "Error: the result cannot be written to stdout: Broken pipe\n")


def test_a_help_on_a_full_disk_is_one_line_and_a_code():
    with open("/dev/full", "wb") as full:
        done = python("from kitsune.cli import main as cli; cli.main()", "plan", "--help", stdout=full)
    told = "the help cannot be written to stdout: No space left on device"
    assert (done.returncode, done.stderr) == (3, f"Error: {told}\n")


@pytest.mark.parametrize(
    ("words", "what"), [(["doctor"], "result"), (["doctor", "--json"], "result"), (["-h"], "help")]
)
def test_a_stdout_that_was_closed_is_one_line_and_a_code(words, what):
    closing = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    done = python(closing, CALLS.replace("CALL", "shows"), *words)
    told = f"the {what} cannot be written to stdout: Bad file descriptor"
    assert (done.returncode, done.stderr) == (3, f"Error: {told}\n")


def test_a_stderr_that_was_closed_takes_nothing_away_from_the_result():
    closing = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    calls = CALLS.replace("CALL", "notes").replace("cli.doctor", "def notes(_): screen.note('by the way')\ncli.doctor")
    done = python(closing, calls, "doctor", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"fits": True, "checks": []})


STOPPED = {"error": {"type": "Interrupted", "message": "stopped by Ctrl-C", "exit_code": 130}}
PRESSED = """
import os, signal, sys
from kitsune.cli import main as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
def press(): os.kill(os.getpid(), signal.SIGINT)
cli.doctor.checks = lambda: PRESS or []
cli.main()
"""


def test_ctrl_c_is_told_of_on_both_streams():
    done = python(PRESSED.replace("PRESS", "press()"), "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)
    done = python(PRESSED.replace("PRESS", "press()"), "doctor")
    assert (done.returncode, done.stderr, done.stdout) == (130, "stopped by Ctrl-C\n", "")


LOADING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, HANDLER)
class Pressing:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressing())
runpy.run_module("kitsune", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_while_the_command_line_is_loaded_is_told_of():
    loading = LOADING.replace("HANDLER", "signal.default_int_handler")
    done = python(loading, "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)
    done = python(loading, "--help")
    assert (done.returncode, done.stderr, done.stdout) == (130, "stopped by Ctrl-C\n", "")


def test_ctrl_c_that_is_ignored_stays_so():
    done = python(LOADING.replace("HANDLER", "signal.SIG_IGN"), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: kitsune" in done.stdout


def test_ctrl_c_ends_the_process_in_an_import_that_swallows_it(tmp_path):
    """As that of torch does, now and then."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    importing = f"sys.path.insert(0, {str(tmp_path)!r}) or __import__('swallows') and None"
    done = python(PRESSED.replace("PRESS", importing), "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)


def test_ctrl_c_while_the_commands_are_put_together_is_told_of(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "full_app", interrupted)
    code, out, err = call("doctor", "--json")
    assert (code, err, json.loads(out)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_unwinds_before_it_ends_the_process(name, code):
    done = python(WAIT.replace("SIGNAME", name))
    assert (done.returncode, done.stdout, done.stderr) == (code, "cleaned up\n", "")
