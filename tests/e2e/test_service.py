"""The whole journey with real processes: serve, two workers, one script that submits, another one that fetches."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import Command
from tests.store.conftest import Postgres, postgres  # noqa: F401  (a fixture)
from tests.test_docs import PYTHON, WITH_SERVER
from tests.test_docs import script as program

#: Of the models below. One on PostgreSQL: what differs between databases is tested in tests/store.
NAMES = {"sqlite": ("cnn", "bert", "gpt"), "postgresql": ("cnn",)}
#: A trial is a process that imports torch; the machines of CI have two slow cores.
TUNING_S = 540.0

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel


def cnn():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, F.cross_entropy, optimizer, (torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))


def bert():
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=5,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(1, 50, (4, 12))
    x = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, lambda out, y: F.cross_entropy(out.logits, y), optimizer, (x, torch.randint(5, (4,)))


def gpt():
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(1, 50, (4, 12))

    def shifted(out, y):
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    return model, shifted, torch.optim.AdamW(model.parameters(), lr=1e-3), (ids, ids)


MAKERS = {"cnn": cnn, "bert": bert, "gpt": gpt}
"""

FILE = """
import torch
from kitsune import Workload


def make():
    model = torch.nn.Linear(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
"""

SUBMIT = """
import json, sys
import kitsune, torch
from models import MAKERS

torch.manual_seed(1)
runs = {name: kitsune.submit(*MAKERS[name](), trials=2) for name in sys.argv[2:]}
print(json.dumps({name: run.id for name, run in runs.items()}), flush=True)
ends = {name: run.wait(timeout=float(sys.argv[1])) for name, run in runs.items()}
assert set(ends.values()) == {"finished"}, ends
print(json.dumps({name: run.plan().plan_id for name, run in runs.items()}), flush=True)
"""

FETCH = """
import json, sys
import kitsune, torch
from models import MAKERS

torch.manual_seed(2)


def trained(parts, plan):
    model, loss_fn, optimizer, (x, y) = parts
    with kitsune.TrainStep(model, loss_fn, optimizer, plan=plan) as step:
        losses = [float(step(x, y)) for _ in range(5)]
        return {"losses": losses, "report": str(step.report), "plan": step.plan.plan_id if step.plan else None}


def again(make, seed):
    torch.manual_seed(seed)
    return make()


found = {}
for seed, name in enumerate(sys.argv[1:]):
    make = MAKERS[name]
    model, _, optimizer, batch = again(make, seed)
    plan = kitsune.fetch_plan(model, optimizer, batch)
    found[name] = {
        "plan": plan.plan_id if plan else None,
        "plain": trained(again(make, seed), None),
        "fetched": trained(again(make, seed), plan),
        "auto": trained(again(make, seed), "auto"),
    }
model, _, optimizer, batch = MAKERS["cnn"]()
model[0].stride = (2, 2)
model[4] = torch.nn.Linear(8 * 9, 5)
found["another"] = kitsune.fetch_plan(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch)
print(json.dumps(found))
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/kitsune.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture
def start(tmp_path: Path, database: str) -> Iterator[Callable[..., Command]]:
    """Starts `kitsune` processes of one user on one database."""
    started: list[Command] = []

    def command(*words: str) -> Command:
        folder = tmp_path / f"{words[0]}{len(started)}"
        home = {"KITSUNE_HOME": str(tmp_path / "home"), "KITSUNE_DATABASE_URL": database}
        started.append(Command(folder, *words, **home))
        return started[-1]

    yield command
    for running in started:
        running.close()


@pytest.fixture
def url(start: Callable[..., Command]) -> str:
    """Of a server that answers."""
    server = start("serve", "--port", "0")
    server.wait_for("http://")
    return str(re.search(r"http://[0-9.]+:\d+", server.err.read_text())[0])  # type: ignore[index]


@pytest.fixture
def script(tmp_path: Path, url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a user's script, of which the server's address is all that it is told; it finds the token by itself."""
    (tmp_path / "models.py").write_text(MODELS)

    def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {"KITSUNE_HOME": str(tmp_path / "home"), "KITSUNE_SERVER": url, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=TUNING_S,
        )

    return run


def lines_of(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.minutes
@pytest.mark.timeout(TUNING_S + 120)
def test_submit_tune_fetch_and_train(start, url, script, database):
    names = NAMES[database.partition(":")[0]]
    workers = [start("worker", "--device", "cpu") for _ in range(2)]
    ids, plans = lines_of(script(SUBMIT, str(TUNING_S - 60), *names))
    (found,) = lines_of(script(FETCH, *names))
    for name in names:
        got = found[name]
        assert got["plan"] == got["auto"]["plan"] == plans[name], name
        for how in ("fetched", "auto"):
            assert got[how]["losses"] == pytest.approx(got["plain"]["losses"], rel=0.05), (name, how, got)
    assert found["another"] is None
    assert all(worker.process.poll() is None for worker in workers)
    if len(names) > 1:
        check_what_the_commands_show(start, url, ids)


@pytest.mark.timeout(TUNING_S)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.minutes] * (page == "README.md")) for page in sorted(WITH_SERVER)]
)
def test_the_journeys_of_the_pages(start, script, page):
    """A page as one script, beside a server and a worker, with one trial where it asks for two: each takes 20 s."""
    start("worker", "--device", "cpu")
    asked = program([block for block in PYTHON if block.page == page and block.need in ("", "server")])
    done = script(asked.replace("trials=2", "trials=1"))
    assert done.returncode == 0, done.stderr
    assert "no plan was fetched" not in done.stderr


def check_what_the_commands_show(start: Callable[..., Command], url: str, ids: dict[str, str]) -> None:
    """The same by `kitsune runs`, from the server and from its database, and by `kitsune plan`."""
    code, out, _ = start("runs", "list", "--server", url, "--json").wait()
    listed = {run["id"]: run for run in json.loads(out)["runs"]}
    assert code == 0
    assert {run["status"] for run in listed.values()} == {"finished"}
    assert len({listed[run_id]["worker"] for run_id in ids.values()} - {None}) <= 2
    shown = [start("runs", "show", ids["cnn"], "--json", *where).wait() for where in ((), ("--server", url))]
    assert shown[0][:2] == shown[1][:2]
    code, _, err = start("runs", "watch", ids["bert"], "--server", url).wait()
    assert code == 0
    assert "[confirm]" in err
    plan_ids = [listed[ids[name]]["plan_id"] for name in ("cnn", "bert")]
    code, out, _ = start("plan", "diff", *plan_ids, "--server", url, "--json").wait()
    assert code == 0
    assert "fingerprint" in {row["field"] for row in json.loads(out)["differences"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_workload_of_a_file_is_submitted_looked_at_and_cancelled(start, url, tmp_path):
    (tmp_path / "train.py").write_text(FILE)
    spec = f"{tmp_path / 'train.py'}:make"
    code, out, _ = start("submit", spec, "--trials", "2", "--name", "mine", "--server", url, "--json").wait()
    assert code == 0
    run_id = json.loads(out)["run_id"]
    code, _, err = start("runs", "cancel", run_id, "--server", url).wait()
    assert (code, "cancelled" in err) == (0, True)
    code, out, _ = start("runs", "show", run_id, "--server", url, "--json").wait()
    run = json.loads(out)["run"]
    assert (run["status"], run["name"], run["workload"]) == ("cancelled", "mine", "archive")
    assert start("plan", "fetch", spec, "--server", url).wait()[0] == 4
    code, out, _ = start("runs", "delete", "--older-than", "0.001s", "--server", url, "--yes", "--json").wait()
    assert (code, json.loads(out)) == (0, {"runs": 1, "trials": 0, "deleted": True})
    assert start("runs", "show", run_id, "--server", url).wait()[0] == 4
    code, _, err = start("submit", spec, "--server", "http://127.0.0.1:9").wait()
    assert (code, "the connection was refused" in err) == (6, True)
