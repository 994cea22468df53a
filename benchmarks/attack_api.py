"""The description that a server gives of itself in; how many answers to made-up requests it does not cover out.

schemathesis makes the requests: the examples, the edges of every schema, values by chance that fit it or do not, and
chains in which a request uses what an earlier one was answered. Half of the ids are those of runs, plans and archives
that are there, since most routes say nothing but 404 of others. Two of its checks are left out. That every request is
accepted which the schemas allow: they cannot say that a hash fits the bytes, or that a cursor is one of ours. And that
all parts of a run are there once it is: it has no trace before it has a plan.
"""

import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from sqlalchemy import Connection

from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from tests.store.samples import a_plan, a_run, a_timeline, some_class_tables
from tests.unit.kitsune.submission import hostile
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep
from tuner.records import Run, RunStatus
from tuner.store.engine import open_database
from tuner.store.queries import archives, class_tables, runs, timelines

SCHEMATHESIS: Final = Path(sysconfig.get_path("scripts")) / "schemathesis"
RUN: Final = "/api/v1/runs/{run_id}"
#: Runs that may be deleted: more than are.
DOOMED: Final = 1000
_SERVER_ERROR: Final = "ServerError"
_MAX_TOLD: Final = 10_000
_ANSWERS: Final = re.compile(r'^kitsune_http_requests_total\{.*status="(\d+)"\} ([\d.e+]+)$', re.MULTILINE)


@dataclass(frozen=True)
class Known:
    """What the database holds, by the parameters of the API that name it; `doomed` are runs that may be deleted."""

    runs: Sequence[str]
    doomed: Sequence[str]
    plans: Sequence[str]
    fingerprints: Sequence[str]
    archives: Sequence[str]

    def config(self) -> str:
        """For schemathesis. Of a stream it looks at the first event: that of a queued run has no end to wait for."""
        pairs = [f"{one},{other}" for one in self.runs for other in self.runs if one < other]
        bound = {
            "path.run_id": self.runs,
            "path.plan_id": self.plans,
            "query.ids": pairs,
            "query.fingerprint": self.fingerprints,
            "body.archive": self.archives,
        }
        words = {name: re.sub(r"\W", "_", name) for name in bound}
        return "\n".join(
            [
                "[parameters]",
                *(f'"{name}" = {{dictionary = "{words[name]}", probability = 0.5}}' for name in bound),
                *(f"[dictionaries.{words[name]}]\nvalues = {json.dumps(values)}" for name, values in bound.items()),
                f"[dictionaries.doomed]\nvalues = {json.dumps(self.doomed)}",
                f'[[operations]]\ninclude-path = "{RUN}"\ninclude-method = "DELETE"',
                'parameters = {"path.run_id" = {dictionary = "doomed", probability = 0.5}}',
                f'[[operations]]\ninclude-path = "{RUN}/events"\nmax-stream-events = 1',
            ]
        )


def attacked(folder: Path, examples: int, seed: int, *options: str) -> Iterator[Figure]:
    """Figures of a run with so many cases by chance for each operation, beside those that its schemas give."""
    with serving(folder, f"sqlite:///{folder}/api.db") as server:
        known = filled(server.database)
        told = ("--max-examples", str(examples), "--seed", str(seed), *options)
        yield from figures(tested(server, folder, known, *told), answers(server))


def filled(database: str) -> Known:
    """Puts runs of every kind into it, none of which a stream of events waits for."""
    told = [stories.measured_on_a_cpu(), stories.with_a_gain(), stories.failed(), stories.cancelled()]
    doomed = [a_run(status=RunStatus.FAILED, error="nobody needs it") for _ in range(DOOMED)]
    valid = hostile.valid()
    with open_database(database) as opened:
        kept = [keep(opened, story) for story in told]
        with opened.begin() as connection:
            kept.append(traced(connection))
            for run in doomed:
                runs.add(connection, run)
            stored, _ = archives.put(connection, valid.to_bytes(), valid)
    plans = [plan for _, _, plan in told if plan is not None]
    return Known(
        runs=[run.id for run in kept],
        doomed=[run.id for run in doomed],
        plans=[plan.plan_id for plan in plans],
        fingerprints=[*(plan.fingerprint for plan in plans), stored.fingerprint],
        archives=[stored.sha256],
    )


def traced(connection: Connection) -> Run:
    """A run with the launches of a step by its plan and its times by class, as a worker writes them."""
    queued = a_run()
    runs.add(connection, queued)
    claimed = runs.claim_one(connection, queued.id, "worker")
    assert claimed is not None
    timelines.put(connection, claimed, a_timeline())
    class_tables.put(connection, claimed, some_class_tables())
    return runs.finish(connection, claimed, plan=a_plan(knobs={"capture": "step", "streams": 4}))


def tested(server: Serving, folder: Path, known: Known, *options: str) -> Mapping[str, Any]:
    """What schemathesis reports; it ends with 1 where it found something, which the report then holds.

    One worker: with more of them Python 3.11 fails now and then, in `ast.parse` of several threads.
    """
    config, report = folder / "schemathesis.toml", folder / "schemathesis.json"
    config.write_text(known.config())
    done = subprocess.run(
        [
            SCHEMATHESIS, "--config-file", config, "run", f"{server.url}/openapi.json", "--workers", "1",
            "--header", f"Authorization: Bearer {server.token}", "--checks", "all", "--exclude-checks",
            "positive_data_acceptance,ensure_resource_availability", "--continue-on-failure",
            "--request-timeout", "60", "--max-response-time", "60", "--generation-database", "none", "--report", "json",
            "--report-json-path", report, *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise SystemExit(f"schemathesis did not run: {done.stdout}{done.stderr}")
    if done.returncode:
        print(done.stdout[-_MAX_TOLD:], file=sys.stderr)
    found: Mapping[str, Any] = json.loads(report.read_text())
    return found


def answers(server: Serving) -> Counter[int]:
    """How often the server gave each status, as it counts itself."""
    told = httpx.get(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"}, timeout=60
    ).raise_for_status()
    found: Counter[int] = Counter()
    for status, number in _ANSWERS.findall(told.text):
        found[int(status)] += int(float(number))
    return found


def figures(report: Mapping[str, Any], answered: Counter[int]) -> Iterator[Figure]:
    cases, sent = report["test_cases"]["generated"], answered.total()
    faults: Counter[bool] = Counter()
    for failure in report["failures"]:
        faults[failure["type"] == _SERVER_ERROR] += failure["count"]
    untested = report["operations"]["total"] - report["operations"]["tested"]
    yield "api: cases", cases, "cases", cases
    for status, number in sorted(answered.items()):
        yield f"api: answers {status}", number, "answers", sent
    yield "api: answers of 5xx", sum(number for status, number in answered.items() if status >= 500), "answers", sent
    yield "api: undocumented answers", faults[False], "answers", cases
    yield "api: cases without an answer", report["test_cases"]["errored"], "cases", cases
    yield "api: operations left out", untested, "operations", report["operations"]["total"]
