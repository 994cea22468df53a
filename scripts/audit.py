"""Looks for known vulnerabilities of the versions in constraints.txt; says what could not be checked.

That fails nothing, so that a machine without a network can run all checks. AUDIT_STRICT=1 is for one that must have
looked, such as the CI that a release needs: exit code 2 then.

pip-audit itself ends in the same way whether it found nothing, or was told by a mirror that it knows no package at all;
and for a service that cannot be reached it fails as for a finding.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
COMMAND: Final = (
    *(sys.executable, "-m", "pip_audit", "--requirement", "constraints.txt", "--no-deps", "--disable-pip"),
    *("--format", "json", "--progress-spinner", "off"),
)
#: How pip-audit ends that did not reach its service: its own errors, or those of requests that it does not foresee.
UNREACHED: Final = re.compile(r"requests\.exceptions\.\w+|ServiceError|ConnectionError|Could not connect")
NOT_CHECKED: Final = "NOT CHECKED"
UNCHECKED: Final = 2


def main() -> int:
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False)
    code, lines = outcome(done.stdout, done.stderr)
    print("\n".join(f"scripts/audit.py: {line}" for line in lines), file=sys.stderr)
    is_strict = os.environ.get("AUDIT_STRICT", "") not in ("", "0")
    return code or (UNCHECKED if is_strict and any(NOT_CHECKED in line for line in lines) else 0)


def outcome(report: str, errors: str) -> tuple[int, list[str]]:
    """The exit code, and what to tell."""
    last = (errors.strip().splitlines() or [""])[-1]
    try:
        found: Sequence[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        if UNREACHED.search(last):
            return 0, [f"{NOT_CHECKED} for known vulnerabilities, the service cannot be reached: {last[:300]}"]
        return 1, [f"pip-audit failed: {last[:300]}"]
    unknown = [one["name"] for one in found if "skip_reason" in one]
    if len(unknown) == len(found):
        return 0, [f"{NOT_CHECKED} for known vulnerabilities: what answers as the service knows none of our packages"]
    known = [(one, flaw) for one in found for flaw in one.get("vulns", ())]
    lines = [f"{one['name']} {one['version']} has {flaw['id']}; fixed in {fixes(flaw)}" for one, flaw in known]
    if unknown:
        lines.append(f"{NOT_CHECKED}, since the service does not know them: {', '.join(unknown)}")
    return int(bool(known)), [
        *lines,
        f"{len(found) - len(unknown)} packages checked, {len(known)} known vulnerabilities",
    ]


def fixes(flaw: dict[str, Any]) -> str:
    return ", ".join(flaw["fix_versions"]) or "no version yet"


if __name__ == "__main__":
    sys.exit(main())
