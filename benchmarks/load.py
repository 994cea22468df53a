"""Asks a real `kitsune serve` on a database of 5 000 plans as fast as it answers, then submits from 50 clients at once.

    python -m benchmarks.load --seconds 10

Server and client are two processes, each on a core of its own, which it may have to share with whatever else runs on
the machine: a line tells how busy that was, and how much of its time the hypervisor gave to others. Look-ups: 32
connections that are kept, each asking for one of the 5 000 workloads by chance; `first` asks for each of them once,
right after the server has started; `304` brings the ETag along; `server` is the time of the processor that the server
had for one of them. Submits: every one is sent a second time with its key, as a client does whose answer was lost.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks import machine, results_file
from benchmarks.connections import Answer, keep_asking
from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from kitsune.plan import Environment, Evidence, Interval, Numerics, Plan
from kitsune.submission.exporting.export import to_archive
from kitsune.workload import Workload
from tuner.store.engine import open_database
from tuner.store.queries import plans, runs

PLANS = 5_000
READERS = 32
WRITERS, SUBMITS = 100, 50
#: Of the cores that the benchmark may use; the first ones have more of what the system itself does.
SERVER_CORE, CLIENT_CORE = -1, -2
GPU, TORCH = "NVIDIA H200", "2.13.0"


def request(server: Serving, line: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    given = {"Host": f"{server.host}:{server.port}", "Authorization": f"Bearer {server.token}", **(headers or {})}
    if body:
        given["Content-Length"] = str(len(body))
    return "\r\n".join([f"{line} HTTP/1.1", *map(": ".join, given.items()), "", ""]).encode() + body


def ask(server: Serving, clients: int, following: Callable[[], bytes | None]) -> tuple[list[Answer], float]:
    return asyncio.run(keep_asking(server.host, server.port, clients, following))


def fill(database: str) -> None:
    with open_database(database) as opened, opened.begin() as connection:
        for number in range(PLANS):
            plans.put(connection, a_plan(fingerprint(number)))


def fingerprint(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def a_plan(fingerprint: str) -> Plan:
    """One as a tuning run writes it, with its evidence."""
    gain = Interval(median=1.5, low=1.4, high=1.6)
    errors = dict.fromkeys(("loss_error", "gradient_error", "parameter_error"), 1e-4)
    allowed = dict.fromkeys(("loss_allowed", "gradient_allowed", "parameter_allowed"), 1e-2)
    return Plan(
        knobs={"precision": "bf16"},
        fingerprint=fingerprint,
        environment=Environment(
            device="cuda",
            gpu=GPU,
            compute_capability="9.0",
            memory_bytes=150_000_000_000,
            driver="580",
            cuda="13.0",
            torch=TORCH,
            triton="3.7.1",
            python="3.11",
            kitsune="0",
        ),
        evidence=Evidence(
            run_id="run",
            verdict="faster",
            baseline="compile=default",
            baseline_step_ms=10.0,
            step_ms=6.7,
            speedup=gain,
            eager_step_ms=10.0,
            speedup_over_eager=gain,
            baseline_peak_bytes=1,
            peak_bytes=1,
            first_step_s=1.0,
            blocks=20,
            samples_sha256="0" * 64,
            numerics=Numerics.model_validate({"steps": 3, **errors, **allowed}),
        ),
    )


def look_ups(server: Serving, seconds: float) -> Iterator[Figure]:
    asked = [f"GET /api/v1/plans?fingerprint={fingerprint(n)}&gpu=NVIDIA+H200&torch={TORCH}" for n in range(PLANS)]
    plain = [request(server, line) for line in asked]
    yield from rates(server, "lookup first", each(plain), 200)
    yield from rates(server, "lookup", by_chance(plain, seconds), 200)
    tags = [tag_of(answer) for answer in ask(server, 1, each(plain))[0]]  # by one client, so in their order
    tagged = [request(server, line, headers={"If-None-Match": tag}) for line, tag in zip(asked, tags, strict=True)]
    yield from rates(server, "lookup 304", by_chance(tagged, seconds), 304)


def each(requests: list[bytes]) -> Callable[[], bytes | None]:
    once = iter(requests)
    return lambda: next(once, None)


def by_chance(requests: list[bytes], seconds: float) -> Callable[[], bytes | None]:
    chance, end = random.Random(0), time.monotonic() + seconds
    return lambda: chance.choice(requests) if time.monotonic() < end else None


def tag_of(answer: Answer) -> str:
    found = re.search(rb'\r\netag: ("[^"]+")', answer.head)
    assert found, answer.head
    return found[1].decode()


def rates(server: Serving, case: str, following: Callable[[], bytes | None], status: int) -> Iterator[Figure]:
    """A look-up that is answered otherwise, or with no plan, ends the measurement."""
    before = machine.processor_s(server.process.pid)
    answers, seconds = ask(server, READERS, following)
    used_s = machine.processor_s(server.process.pid) - before
    wrong = [answer for answer in answers if answer.status != status or not fits(answer)]
    if wrong:
        raise SystemExit(f"{case}: {len(wrong)} wrong answers, the first: {wrong[0]}")
    times = sorted(answer.seconds * 1e3 for answer in answers)
    count = len(answers)
    yield case, count / seconds, "req/s", count
    yield f"{case} p50", statistics.median(times), "ms", count
    yield f"{case} p99", times[min(count - 1, count * 99 // 100)], "ms", count
    yield f"{case} server", used_s / count * 1e6, "us", count


def fits(answer: Answer) -> bool:
    return answer.status != 200 or answer.body.startswith(b'{"match":"exact"')


def submits(server: Serving) -> Iterator[Figure]:
    """Lost: acknowledged and not in the database. Doubled: more runs than keys. Locked: said so, or failed at all."""
    archive = send_archive(server)
    requests = [submit(server, archive, number) for number in range(WRITERS * SUBMITS)]
    twice = itertools.chain(requests, requests)
    answers, seconds = ask(server, WRITERS, lambda: next(twice, None))
    acknowledged = {json.loads(answer.body)["id"] for answer in answers if answer.status in (200, 201)}
    kept = set(kept_runs(server.database))
    locked = [answer for answer in answers if answer.status >= 500 or b"locked" in answer.body]
    count = len(requests)
    yield "submits acknowledged", sum(answer.status in (200, 201) for answer in answers), "answers", len(answers)
    yield "submits lost", len(acknowledged - kept) + (count - len(acknowledged)), "runs", count
    yield "submits doubled", max(0, len(kept) - count), "runs", count
    yield "submits locked", len(locked) + server.log.read_text().count("is locked"), "errors", len(answers)
    yield "submits", len(answers) / seconds, "req/s", len(answers)
    yield "submits slowest", max(answer.seconds for answer in answers) * 1e3, "ms", len(answers)


def send_archive(server: Serving) -> str:
    model = torch.nn.Linear(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    step = Workload(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    content = to_archive(step).to_bytes()
    put = iter([request(server, f"PUT /api/v1/archives/{hashlib.sha256(content).hexdigest()}", content)])
    (answer,), _ = ask(server, 1, lambda: next(put, None))
    name = json.loads(answer.body)["sha256"]
    assert isinstance(name, str)
    return name


def submit(server: Serving, archive: str, number: int) -> bytes:
    body = json.dumps({"archive": archive, "seed": number}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": f"load-{number}"}
    return request(server, "POST /api/v1/runs", body, headers)


def kept_runs(database: str) -> Iterator[str]:
    after: str | None = None
    with open_database(database) as opened, opened.read() as connection:
        while True:
            page = runs.page(connection, after=after, limit=200)
            yield from (run.id for run in page.runs)
            after = page.after
            if after is None:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of look-ups")
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/load.db"
        fill(database)
        with machine.on_core(SERVER_CORE), serving(Path(folder), database) as server, machine.on_core(CLIENT_CORE):
            before = machine.ticks()
            figures = [*look_ups(server, arguments.seconds)]
            looked_up = {"kind": "conditions", "suite": "load", "case": "lookup", **machine.conditions(before)}
            before = machine.ticks()
            figures += submits(server)
            submitted = {"kind": "conditions", "suite": "load", "case": "submits", **machine.conditions(before)}
    path = arguments.out or results_file.free_path("load")
    results_file.write_figures(path, "load", figures)
    for line in (looked_up, submitted):
        results_file.append(path, line)


if __name__ == "__main__":
    main()
