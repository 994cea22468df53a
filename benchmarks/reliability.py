"""Kills real workers and real servers with SIGKILL at moments by chance, then counts what was lost or counted twice.

    python -m benchmarks.reliability --kills 40

Workers carry out submitted runs of a small MLP on the CPU, each trial in a process of its own; a kill counts when its
worker held a run. Servers are killed beneath clients that submit with idempotency keys. In the end the queue is
drained, and the database is held against what was acknowledged. A fault is told on stderr, and the exit code is 1.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_file, server_kills, worker_kills
from benchmarks.audit import Audit, audited, ids_of
from benchmarks.results_file import Figure
from kitsune.submission.format.archive import Archive
from tests.e2e.command import Command
from tests.unit.kitsune.submission.steps import archive_of
from tuner.store.engine import open_database
from tuner.store.queries.runs import MAX_DEATHS

PARTS = ("workers", "servers")


def killed_workers(folder: Path, url: str, archive: Archive, asked: argparse.Namespace) -> Iterator[Figure]:
    with open_database(url) as database:
        before = ids_of(database)
        campaign = worker_kills.Campaign(folder, url, database, archive, asked.trials, asked.lease, asked.seats)
        try:
            campaign.submit(asked.runs)
            campaign.kill(asked.kills, asked.minutes * 60)
            campaign.drain()
            found = audited(database, campaign.acknowledged, before)
            survivors = campaign.survivors()
        finally:
            campaign.close()
    hits = campaign.hits
    yield "worker kills", len(hits), "kills", len(campaign.kills)
    for stage, number in sorted(Counter(kill.stage for kill in hits).items()):
        yield f"worker kills in {stage}", number, "kills", len(hits)
    yield "worker kills of idle workers", len(campaign.kills) - len(hits), "kills", len(campaign.kills)
    yield "worker kills: runs hit", len({kill.run for kill in hits}), "runs", len(campaign.acknowledged)
    yield from outcome("worker kills", found, len(hits), len(campaign.acknowledged))
    yield "worker kills: measuring processes that outlived", len(survivors), "processes", len(hits)
    yield from noise("worker kills", campaign.hired, len(hits))


def killed_servers(folder: Path, url: str, archive: Archive, asked: argparse.Namespace) -> Iterator[Figure]:
    before = known(asked.database)
    campaign = server_kills.Campaign(folder, url, archive, asked.trials, asked.clients, server_kills.free_port())
    try:
        campaign.kill(asked.kills)
        changed = campaign.ask_again()
        campaign.drain()
    finally:
        campaign.close()
    journal, kills, struck = campaign.journal, len(campaign.kills), campaign.struck()
    with open_database(url) as database:
        found = audited(database, list(journal.acknowledged.values()), before)
    complain([*changed, *journal.wrong])
    yield "server kills", kills, "kills", kills
    yield "server kills while it started", sum(not kill.was_serving for kill in campaign.kills), "kills", kills
    yield "server kills with requests in flight", len(struck), "kills", kills
    yield "server kills: requests in flight", sum(struck.values()), "requests", kills
    yield "server kills: stored, but not heard of", len(journal.unheard), "requests", sum(struck.values())
    yield "server kills: keys answered otherwise later", len(changed), "keys", kills
    yield "server kills: wrong answers", len(journal.wrong), "answers", kills
    yield from outcome("server kills", found, kills, len(journal.acknowledged))
    yield from noise("server kills", campaign.served, kills)


def known(url: str | None) -> frozenset[str]:
    """The runs of a database that is not ours alone; a new file is left to the servers, which make its tables."""
    if url is None:
        return frozenset()
    with open_database(url) as database:
        return ids_of(database)


def outcome(case: str, found: Audit, kills: int, acknowledged: int) -> Iterator[Figure]:
    """Of a fault, n is how many kills there were that could have brought it about."""
    complain(found.faults)
    yield f"{case}: runs acknowledged", acknowledged, "runs", acknowledged
    yield f"{case}: runs finished", found.finished, "runs", acknowledged
    yield f"{case}: {GIVEN_UP}", found.in_vain, "runs", acknowledged
    yield f"{case}: runs continued after a trial", found.resumed, "runs", acknowledged
    yield f"{case}: trials", found.trials, "trials", found.trials
    yield f"{case}: runs lost", len(found.lost), "runs", kills
    yield f"{case}: runs doubled", len(found.doubled), "runs", kills
    yield f"{case}: runs failed otherwise", len(found.failed), "runs", kills
    yield f"{case}: trials counted wrongly", len(found.miscounted), "runs", kills
    yield f"{case}: plans not written once", len(found.misplanned), "runs", kills


def noise(case: str, commands: Sequence[Command], kills: int) -> Iterator[Figure]:
    said = [worker_kills.said(command) for command in commands]
    complain([text for text in said if "Traceback" in text or "is locked" in text])
    yield f"{case}: database is locked", sum(text.count("is locked") for text in said), "lines", kills
    yield f"{case}: tracebacks", sum(text.count("Traceback") for text in said), "lines", kills


def complain(faults: Sequence[str]) -> None:
    for fault in faults:
        print(fault, file=sys.stderr)


#: Workers after them could have ended these runs: nothing but the kills was in their way.
GIVEN_UP = f"runs ended as {MAX_DEATHS} workers died in vain"
#: What must not happen at all: any other value than 0 is a fault.
NEVER = (
    "runs lost", "runs doubled", "runs failed otherwise", "trials counted wrongly", "plans not written once",
    "database is locked", "tracebacks", "measuring processes that outlived", "keys answered otherwise later",
    "wrong answers", GIVEN_UP,
)  # fmt: skip


def is_never(case: str) -> bool:
    return case.partition(": ")[2] in NEVER


def line_of(figure: Figure, command: str) -> dict[str, Any]:
    """With the rule of three where nothing happened in n kills: then, at 95 %, it happens in less than 3/n of them."""
    case, value, _, count = figure
    bound = 3 / count if is_never(case) and value == 0 and count else None
    return results_file.figure_line("reliability", figure, command, bound)


def measured(asked: argparse.Namespace) -> Iterator[Figure]:
    archive = archive_of("mlp")
    with tempfile.TemporaryDirectory(prefix="kitsune-reliability-") as name:
        for part in asked.part or PARTS:
            folder, begin = Path(name) / part, time.monotonic()
            folder.mkdir()
            url = asked.database or f"sqlite:///{folder}/queue.db"
            measure = killed_workers if part == "workers" else killed_servers
            figures = list(measure(folder, url, archive, asked))
            yield from figures
            yield f"{part}: all of it", time.monotonic() - begin, "s", 1


def main() -> int:
    asked = arguments()
    random.seed(asked.seed)
    command = results_file.command_line()
    if asked.database is not None:  # which may hold a password
        command = command.replace(asked.database, f"{asked.database.partition(':')[0]}://...")
    figures = list(measured(asked))
    path = asked.out or results_file.free_path("reliability")
    results_file.append(path, results_file.environment_line(command))
    for figure in figures:
        line = line_of(figure, command)
        results_file.append(path, line)
        print(json.dumps(line))
    return int(any(value != 0 for case, value, _, _ in figures if is_never(case)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="of workers that hold a run, and again of servers")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")
    parser.add_argument("--database", metavar="URL", help="whose queue is empty; a new SQLite file otherwise")
    parser.add_argument("--runs", type=int, default=16, help="submitted at first for the workers")
    parser.add_argument("--trials", type=int, default=2, help="of each run")
    parser.add_argument("--seats", type=int, default=3, help="workers at once")
    parser.add_argument("--clients", type=int, default=8, help="of the server at once")
    parser.add_argument("--lease", default="3s", help="of the workers")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no more workers are killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results otherwise")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
