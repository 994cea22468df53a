"""Asks a real `kitsune serve` for its pages, signed in as a browser is, while eight workers write into its database.

    python -m benchmarks.pages_load --runs 10000

The database has so many runs with 30 trials each, on SQLite and then on a PostgreSQL of pip's with its own settings.
Whoever asks waits for each answer before the next request; kinds of pages take turns by chance. The writers are
processes of `benchmarks/pages_writer.py`. Server, database, writers and whoever asks share the cores of the machine,
with whatever else runs there: the environment line has its load and how much of its time the hypervisor gave to others.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import func, select

from benchmarks import machine, results_file
from benchmarks.connections import Answer, Connection
from benchmarks.pages_database import GPUS, MODELS, TRIALS, fill
from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from tests import postgres
from tuner.records import DEFAULT_TEAM, Run, RunStatus, Verdict
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import runs
from tuner.store.queries.runs import Sort

SUITE: Final = "load"
DATABASES: Final = ("sqlite", "postgresql")
PAGE: Final = 50

Paths = Mapping[str, Sequence[str]]


def paths_of(database: Database, ended: Sequence[Run], drawn: random.Random) -> Paths:
    """What is asked for, by the kind of page."""
    planned = [run for run in ended if run.plan_id is not None]
    some = drawn.sample(planned, min(len(planned), 1000))  # few twice: the server remembers parts of some pages
    deep = list(deep_places(database, len(ended)))
    filtered = list(filtered_places(planned[0].fingerprint))
    orders = [{"sort": sort.value, "order": order} for sort in Sort for order in ("asc", "desc")]
    compared = [",".join(run.id for run in drawn.sample(planned, number)) for number in (2, 20) for _ in range(10)]
    pages = {
        "list": ["/runs"],
        "list filtered": [f"/runs?{urlencode(one)}" for one in filtered],
        "list sorted": [f"/runs?{urlencode(one)}" for one in orders],
        "list deep": [f"/runs?{urlencode(one)}" for one in deep],
        "list renewed": ["/fragments/runs"],
        "run": [f"/runs/{run.id}" for run in some],
        "model": [f"/models/{fingerprint}" for fingerprint in {run.fingerprint for run in planned}],
        "compare": [f"/compare?ids={ids}" for ids in compared],
    }
    twins = {
        "api list": [f"/runs?{urlencode(one)}" for one in ({}, *filtered, *orders)],
        "api list deep": [f"/runs?{urlencode(one)}" for one in deep],
        "api run": [f"/runs/{run.id}" for run in some],
        "api trials": [f"/runs/{run.id}/trials" for run in some],
        "api compare": [f"/compare?ids={ids}" for ids in compared],
    }
    return pages | {kind: [f"/api/v1{path}" for path in paths] for kind, paths in twins.items()}


def filtered_places(fingerprint: str) -> Iterator[dict[str, str]]:
    """Each filter alone, such that find many, few and nothing, and several together in another order."""
    gpu = next(iter(GPUS))
    yield from ({"status": status.value} for status in RunStatus)
    yield from ({"verdict": verdict.value} for verdict in Verdict)
    yield from ({"gpu": name} for name in (gpu, "none"))
    yield from ({"workload": name} for name in (f"zoo:{MODELS[0]}?batch=32", "none"))
    yield from ({"tag": tag} for tag in ("weekly", "paper", "none"))
    yield {"fingerprint": fingerprint}
    yield {"fingerprint": fingerprint, "sort": Sort.GAIN.value}
    yield {"gpu": gpu, "status": "finished", "sort": Sort.MEMORY.value, "order": "asc"}
    yield {"gpu": gpu, "tag": "paper", "verdict": "faster", "sort": Sort.GAIN.value}
    yield {"tag": "none", "sort": Sort.MEMORY.value, "order": "asc"}


def deep_places(database: Database, number: int) -> Iterator[dict[str, str]]:
    """Pages behind a tenth, half and nine tenths of the list, in three orders."""
    for sort in (Sort.CREATED, Sort.GAIN, Sort.NAME):
        after, passed = None, 0
        with database.read() as connection:
            for share in (0.1, 0.5, 0.9):
                while passed < share * number:
                    after = runs.page(connection, team=DEFAULT_TEAM, sort=sort, after=after, limit=PAGE).after
                    passed += PAGE
                assert after is not None
                yield {"sort": sort.value, "after": after}


# Asking ---------------------------------------------------------------------------------------------------------------


def sign_in(server: Serving) -> str:
    """The cookie of a session, by the form that a browser sends."""
    form = urlencode({"token": server.token, "next": "/runs"}).encode()
    head = {
        "Host": f"{server.host}:{server.port}",
        "Origin": server.url,
        "Content-Type": "application/x-www-form-urlencoded",
        "Content-Length": str(len(form)),
    }
    lines = ["POST /login HTTP/1.1", *map(": ".join, head.items()), "", ""]
    answer = asyncio.run(_ask_once(server, "\r\n".join(lines).encode() + form))
    found = re.search(rb"\r\nset-cookie: (kitsune_session=[^;]+)", answer.head)
    assert answer.status == 303 and found, answer
    return found[1].decode()


async def _ask_once(server: Serving, request: bytes) -> Answer:
    connection = await Connection.open(server.host, server.port)
    answer = await connection.ask(request)
    connection.close()
    return answer


def requests_for(server: Serving, paths: Paths, number: int, drawn: random.Random) -> list[tuple[str, bytes]]:
    """So many of each kind, in an order by chance."""
    cookie = sign_in(server)
    shuffled = []
    for kind, known in paths.items():
        who = f"Authorization: Bearer {server.token}" if kind.startswith("api") else f"Cookie: {cookie}"
        head = f"HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nAccept: text/html,*/*\r\n{who}\r\n\r\n"
        shuffled += [(kind, f"GET {path} {head}".encode()) for path in drawn.choices(known, k=number)]
    drawn.shuffle(shuffled)
    return shuffled


async def ask_all(server: Serving, asked: Sequence[tuple[str, bytes]], readers: int) -> dict[str, list[float]]:
    """Milliseconds of each kind. An answer other than 200 ends the measurement."""
    times: dict[str, list[float]] = defaultdict(list)
    left = iter(asked)
    connections = [await Connection.open(server.host, server.port) for _ in range(readers)]

    async def reader(connection: Connection) -> None:
        for kind, request in left:
            answer = await connection.ask(request)
            if answer.status != 200:
                raise SystemExit(f"{kind}: {answer.status} {request!r} {answer.body[:300]!r}")
            times[kind].append(answer.seconds * 1e3)

    await asyncio.gather(*map(reader, connections))
    for connection in connections:
        connection.close()
    return times


# Writing meanwhile ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(url: str, folder: Path, number: int, pause_s: float) -> Iterator[None]:
    """Ends the measurement when one of the writers has ended by itself, or has complained."""
    logs = [folder / f"writer{index}.log" for index in range(number)]
    command = [sys.executable, "-m", "benchmarks.pages_writer", url, "--pause", str(pause_s)]
    writers = []
    for log in logs:
        with log.open("w") as said:
            writers.append(subprocess.Popen(command, stderr=said, stdout=said))
    try:
        yield
        died = [log.read_text() for log, writer in zip(logs, writers, strict=True) if writer.poll() is not None]
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGTERM)
        for writer in writers:
            writer.wait()
    complaints = [*died, *(text for log in logs if (text := log.read_text()))]
    if complaints:
        raise SystemExit(f"{len(complaints)} writers have complained, the first: {complaints[0][-1000:]}")


def written(database: Database) -> int:
    with database.read() as connection:
        return int(connection.scalar(select(func.count()).select_from(tables.trials)) or 0)


def running(database: Database) -> int:
    with database.read() as connection:
        return runs.count(connection)[RunStatus.RUNNING]


def measured(name: str, url: str, folder: Path, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lines of the result file: what the machine was doing, then every sample and the figures of each kind."""
    drawn = random.Random(asked.seed)
    with open_database(url) as database:
        ended = fill(database, asked.runs, asked.queued)
        paths = paths_of(database, ended, drawn)
        with serving(folder, url) as server, writing(url, folder, asked.writers, asked.pause):
            while running(database) < asked.writers:
                time.sleep(0.1)
            for readers in asked.readers:
                requests = requests_for(server, paths, asked.requests, drawn)
                case = f"{name}, {readers} reader{'s' * (readers > 1)}"
                before, begin, stored = machine.ticks(), time.monotonic(), written(database)
                times = asyncio.run(ask_all(server, requests, readers))
                seconds = time.monotonic() - begin
                yield {"kind": "conditions", "suite": SUITE, "case": case, **machine.conditions(before)}
                figures = [
                    (f"{case}: trials written", (written(database) - stored) / seconds, "trials/s", asked.writers)
                ]
                for kind in paths:
                    yield samples(f"{case}: {kind}", times[kind])
                    figures += percentiles(f"{case}: {kind}", times[kind])
                yield from (results_file.figure_line(SUITE, figure, results_file.command_line()) for figure in figures)


def samples(case: str, times: Sequence[float]) -> dict[str, Any]:
    values = [round(ms, 2) for ms in times]
    return {"kind": "samples", "suite": SUITE, "case": case, "unit": "ms", "n": len(values), "values": values}


def percentiles(case: str, times: Sequence[float]) -> Iterator[Figure]:
    ordered, count = sorted(times), len(times)
    for percent in (50, 95, 99):
        yield f"{case} p{percent}", ordered[min(count - 1, count * percent // 100)], "ms", count


@contextlib.contextmanager
def database_of(name: str, folder: Path) -> Iterator[str]:
    if name == "sqlite":
        yield f"sqlite:///{folder}/pages.db"
        return
    with postgres.started(is_durable=True) as running:
        yield running.create()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help=f"that have ended, with {TRIALS} trials each")
    parser.add_argument("--queued", type=int, default=400, help="for the writers to take")
    parser.add_argument("--requests", type=int, default=200, help="of each kind of page, by each number of readers")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4], help="who ask at the same time")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.25, help="seconds after which a writer stores its next trial")
    parser.add_argument("--database", nargs="+", default=DATABASES, choices=DATABASES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results otherwise")
    asked = parser.parse_args()
    path = asked.out or results_file.free_path(SUITE)
    results_file.append(path, results_file.environment_line(results_file.command_line()))
    for name in asked.database:
        with tempfile.TemporaryDirectory() as folder, database_of(name, Path(folder)) as url:
            for line in measured(name, url, Path(folder), asked):
                results_file.append(path, line)
                if line["kind"] != "samples":
                    print(json.dumps(line))


if __name__ == "__main__":
    main()
