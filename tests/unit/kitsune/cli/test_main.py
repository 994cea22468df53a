"""The base commands in this process, by `cli.run`."""

import json
from importlib.metadata import EntryPoint, version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune import __version__, errors
from kitsune.base.text_format import clean, duration
from kitsune.cli import main, output
from kitsune.cli.doctor import Check, Status
from kitsune.cli.exit_codes import MEANINGS, ExitCode, code_of
from kitsune.errors import KitsuneError

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


STOPPED = {"error": {"type": "Interrupted", "message": "stopped by Ctrl-C", "exit_code": 130}}


def test_ctrl_c_while_the_commands_are_put_together_is_told_of(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "full_app", interrupted)
    code, out, err = call("doctor", "--json")
    assert (code, err, json.loads(out)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)
