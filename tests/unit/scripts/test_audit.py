"""What scripts/check makes of pip-audit's answers."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from scripts import audit

FINE = {"name": "rich", "version": "15.0.0", "vulns": []}
FLAWED = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}]}
HOPELESS = {"name": "old", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": []}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


def report(*found: dict[str, object]) -> str:
    return json.dumps({"dependencies": found, "fixes": []})


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ([FINE], 0, ["1 packages checked, 0 known vulnerabilities"]),
        ([FINE, FLAWED], 1, ["jinja2 2.4.1 has PYSEC-2019-217; fixed in 2.10.1", "2 packages checked, 1 known"]),
        ([HOPELESS], 1, ["fixed in no version yet"]),
        ([FINE, UNKNOWN], 0, ["NOT CHECKED, since the service does not know them: torch", "1 packages checked"]),
        ([FLAWED, UNKNOWN], 1, ["PYSEC-2019-217", "NOT CHECKED"]),
        ([UNKNOWN, UNKNOWN], 0, ["NOT CHECKED for known vulnerabilities", "knows none of our packages"]),
    ],
)
def test_a_finding_fails_and_what_is_unknown_is_said(found, code, words):
    outcome, lines = audit.outcome(report(*found), "WARNING: something")
    assert outcome == code
    for word in words:
        assert word in "\n".join(lines)


@pytest.mark.parametrize(
    "last",
    [
        "requests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org', port=443): Max retries exceeded",
        "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed",
        "pip_audit._service.interface.ConnectionError: PyPI is not redirecting properly",
        "pip_audit._service.interface.ServiceError",
    ],
)
def test_a_service_that_is_away_fails_nothing_and_is_said(last):
    code, (line,) = audit.outcome("", f"Traceback (most recent call last):\n{last}\n")
    assert code == 0
    assert line.startswith("NOT CHECKED for known vulnerabilities, the service cannot be reached")


@pytest.mark.parametrize(
    ("printed", "errors"),
    [("", ""), ("", "ERROR:pip_audit._cli:requirement abc is not pinned"), ("{}", "x"), ("[]", "x"), ("null", "x")],
)
def test_whatever_else_goes_wrong_fails(printed, errors):
    code, (line,) = audit.outcome(printed, errors)
    assert code == 1
    assert "pip-audit failed" in line


def test_it_is_asked_for_what_the_scripts_install(monkeypatch, capsys):
    asked = []

    def run(command, **options):
        asked.append((command, options["cwd"]))
        return SimpleNamespace(stdout=report(FLAWED), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert audit.main() == 1
    assert "jinja2 2.4.1" in capsys.readouterr().err
    ((command, folder),) = asked
    assert (command[0], (folder / "constraints.txt").is_file()) == (sys.executable, True)


@pytest.mark.parametrize(
    ("printed", "errors", "lax", "strict"),
    [
        (report(FINE), "", 0, 0),
        (report(FLAWED), "", 1, 1),
        (report(FLAWED, UNKNOWN), "", 1, 1),
        (report(FINE, UNKNOWN), "", 0, 2),
        (report(UNKNOWN), "", 0, 2),
        ("", "requests.exceptions.ProxyError: HTTPSConnectionPool", 0, 2),
    ],
)
def test_what_must_be_checked_fails_where_it_was_not(monkeypatch, printed, errors, lax, strict):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=printed, stderr=errors))
    for said, code in (("", lax), ("0", lax), ("1", strict)):
        monkeypatch.setenv("AUDIT_STRICT", said)
        assert audit.main() == code
