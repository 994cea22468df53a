"""Stored plans and archives with one bit turned over, each somewhere else; whether whoever reads them notices, out.

The bits are turned in the very bytes of an SQLite file, behind the back of a server that runs: in the text of plans, in
the columns by which they are found, and in the content of archives. It has not read any of them before. A plan is asked
for by its id, by its workload and machine, and through the library; an archive is taken as a worker takes it.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
from pydantic import ValidationError

from benchmarks.attack_archives import complain
from benchmarks.load import a_plan
from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from kitsune.errors import ArchiveError, KitsuneError, PlanError
from kitsune.plan import Plan
from kitsune.submission.format.archive import Archive
from tests.unit.kitsune.submission import hostile
from tests.unit.server.pages import stories
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, plans
from tuner.worker.archive_files import archive_file

FOUND_BY: Final = ("fingerprint", "batch", "device", "gpu", "compute_capability", "torch", "triton", "cuda", "driver")


def attacked(folder: Path, flips: int, seed: int) -> Iterator[Figure]:
    """So many flips in each place: texts of plans, columns of plans, contents of archives."""
    chance, file = Random(seed), folder / "flips.db"
    url = f"sqlite:///{file}"
    with serving(folder, url) as server, open_database(url) as opened, client_of(server) as client:
        *stored, untouched = written(opened, 2 * flips + 1)
        yield from of_texts(client, opened, file, stored[:flips], chance)
        yield from of_columns(client, file, stored[flips:], chance)
        is_found = ask(client, question(untouched)).get("match") == "exact"
        yield "flips: sound plans not found", int(not is_found), "plans", 1
        yield from of_archives(folder, opened, file, flips, chance)
    yield from of_files(folder)


def client_of(server: Serving) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=60)


def written(database: Database, number: int) -> list[Plan]:
    """Plans as tuning writes them, each of a workload of its own."""
    made = [a_plan(hashlib.sha256(str(index).encode()).hexdigest()) for index in range(number)]
    with database.begin() as connection:
        for plan in made:
            plans.put(connection, plan)
    return made


def flipped(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << chance.randrange(8),)) + data[at + 1 :]


def write(file: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(file, timeout=30)) as connection, connection:
        connection.execute(statement, values)


# Plans ----------------------------------------------------------------------------------------------------------------


def of_texts(
    client: httpx.Client, database: Database, file: Path, stored: Sequence[Plan], chance: Random
) -> Iterator[Figure]:
    """`still JSON`: how many only the content tells from what was written."""
    still_json = still_plans = given = found = read = 0
    for plan in stored:
        text = flipped(plan.canonical_json().encode(), chance)
        value = parsed(text)
        still_json += value is not None
        still_plans += is_plan(value)
        write(file, "UPDATE kitsune_plans SET document = CAST(? AS TEXT) WHERE plan_id = ?", text, plan.plan_id)
        given += not is_clear(client.get(f"/api/v1/plans/{plan.plan_id}"))
        found += bool(ask(client, question(plan)).get("plan"))
        read += is_read(database, plan.plan_id)
    count = len(stored)
    yield "flips in texts of plans", count, "flips", count
    yield "flips in texts of plans: still JSON", still_json, "plans", count
    yield "flips in texts of plans: still plans, but for their id", still_plans, "plans", count
    yield "flips in texts of plans: given by id", given, "plans", count
    yield "flips in texts of plans: found by a look-up", found, "plans", count
    yield "flips in texts of plans: read by the library", read, "plans", count


def of_columns(client: httpx.Client, file: Path, stored: Sequence[Plan], chance: Random) -> Iterator[Figure]:
    """Asked for as it was written, and as its row has it now: in neither case it comes back."""
    found = 0
    for plan in stored:
        asked = question(plan)
        name = chance.choice([name for name in FOUND_BY if asked[name]])
        value = flipped(asked[name].encode(), chance).decode("latin-1")
        write(file, f"UPDATE kitsune_plans SET {name} = ? WHERE plan_id = ?", value, plan.plan_id)
        found += sum(bool(ask(client, one).get("plan")) for one in (asked, {**asked, name: value}))
    yield "flips in columns of plans", len(stored), "flips", len(stored)
    yield "flips in columns of plans: found by a look-up", found, "plans", 2 * len(stored)


def question(plan: Plan) -> dict[str, str]:
    machine = plan.environment
    assert machine is not None
    return {name: str(getattr(plan if name in ("fingerprint", "batch") else machine, name)) for name in FOUND_BY}


def ask(client: httpx.Client, question: dict[str, str]) -> dict[str, Any]:
    value = client.get("/api/v1/plans", params=question).json()
    assert isinstance(value, dict)
    return value


def is_clear(answer: httpx.Response) -> bool:
    """Whether it says that this is no plan, and why. What is no UTF-8 any more the driver cannot read."""
    return answer.status_code >= 500 and answer.json()["type"] in ("/problems/damaged", "/problems/unavailable")


def is_read(database: Database, plan_id: str) -> bool:
    try:
        with database.read() as connection:
            plans.get(connection, plan_id)
    except KitsuneError:
        return False
    return True


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_plan(value: Any) -> bool:
    try:
        Plan.model_validate(value)
    except (ValidationError, PlanError):
        return False
    return True


# Archives -------------------------------------------------------------------------------------------------------------


def of_archives(folder: Path, database: Database, file: Path, flips: int, chance: Random) -> Iterator[Figure]:
    """`still archives`: how many a reader would take who does not look at the SHA-256."""
    valid = hostile.valid()
    content = valid.to_bytes()
    with database.begin() as connection:
        stored, _ = archives.put(connection, content, valid)
    readable = taken = mended = 0
    for _ in range(flips):
        altered = flipped(content, chance)
        write(file, "UPDATE kitsune_archives SET content = ?", altered)
        readable += is_archive(altered)
        with database.read() as connection:
            found = archives.content(connection, stored.sha256)
        taken += is_taken(folder, stored.sha256, found)
        with database.begin() as connection:  # as its owner is told to
            archives.put(connection, content, valid)
            mended += archives.content(connection, stored.sha256) == content
    yield "flips in archives", flips, "flips", flips
    yield "flips in archives: still archives, but for their SHA-256", readable, "archives", flips
    yield "flips in archives: taken by a worker", taken, "archives", flips
    yield "flips in archives: not mended by sending them again", flips - mended, "archives", flips


def is_archive(content: bytes) -> bool:
    try:
        Archive.from_bytes(content)
    except ArchiveError:
        return False
    return True


def is_taken(folder: Path, sha256: str, content: bytes | None) -> bool:
    try:
        archive_file(folder, sha256, content)
    except ArchiveError:
        return False
    return True


# Files ----------------------------------------------------------------------------------------------------------------


def of_files(folder: Path) -> Iterator[Figure]:
    """Every single bit of the file of a plan that was measured."""
    _, _, plan = stories.measured_on_a_cpu()
    assert plan is not None
    path = folder / "plan.json"
    plan.save(path)
    data, same, wrong = path.read_bytes(), 0, []
    for bit in range(8 * len(data)):
        at = bit // 8
        path.write_bytes(data[:at] + bytes((data[at] ^ 1 << bit % 8,)) + data[at + 1 :])
        try:
            read = Plan.load(path)
        except PlanError:
            continue
        if read == plan and read.plan_id == plan.plan_id:
            same += 1
        else:
            wrong.append(f"bit {bit}: {data[max(0, at - 30) : at + 30]!r}")
    complain(wrong)
    yield "flips in the file of a plan", 8 * len(data), "flips", 8 * len(data)
    yield "flips in the file of a plan: read as the same plan", same, "flips", 8 * len(data)
    yield "flips in the file of a plan: read as another plan", len(wrong), "flips", 8 * len(data)
