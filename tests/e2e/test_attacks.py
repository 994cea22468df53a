"""Small versions of `benchmarks.attacks`, which a person runs at length: the same attackers against real servers."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import attack_api, attack_flips, attack_names, attack_uploads
from benchmarks.attack_archives import WATCHED, chosen, figures, sent
from benchmarks.attack_uploads import Samples
from benchmarks.attacks import is_fault
from benchmarks.results_file import Figure
from benchmarks.watched import events_since
from tests.unit.kitsune.submission.hostile_archives import CANARY, GOOD, HOSTILE, PICKLE


@pytest.fixture(autouse=True)
def no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_REQUESTS_PER_MINUTE", "0")


def faults(found: Iterable[Figure | Samples], at_least: int) -> list[Figure]:
    """What must never happen; some of all that is counted must, or the attack hit nothing.

    How long things take at most is left to the benchmark, which has a machine of its own and more samples.
    """
    told = [one for one in found if not isinstance(one, Samples)]
    assert max(count for _, _, _, count in told) >= at_least
    return [figure for figure in told if is_fault(figure, {})]


@pytest.mark.minutes  # tests/unit/server sends what hypothesis finds to every route
def test_the_description_of_the_api_holds_at_every_edge_of_its_schemas(tmp_path):
    assert faults(attack_api.attacked(tmp_path, 1, 0, "--phases", "coverage"), at_least=500) == []


def test_no_archive_runs_code_or_breaks_the_server_or_a_reader(tmp_path):
    by_hand = [("by hand", data) for name, (data, _) in HOSTILE.items() if name.startswith(("a", "code"))]
    archives = [*by_hand, *chosen((GOOD,), 120, seed=0)]
    assert faults(figures("archives", sent(tmp_path, "archives", archives)), at_least=200) == []


@pytest.mark.minutes
def test_foreign_names_and_paths_lead_nowhere(tmp_path):
    assert faults(attack_names.attacked(tmp_path, traversals=12, methods=("DELETE",)), at_least=400) == []


@pytest.mark.parametrize(
    "kinds",
    [
        ("endless", "pipelined"),
        pytest.param(("tiny_chunks",), marks=pytest.mark.minutes),  # test_connections.py sends some
    ],
    ids="-".join,
)
def test_uploads_that_do_harm_leave_the_server_healthy(tmp_path, kinds):
    assert faults(attack_uploads.attacked(tmp_path, 0.5, kinds, share=0.3), at_least=30) == []


@pytest.mark.minutes
def test_every_flipped_bit_is_noticed(tmp_path):
    assert faults(attack_flips.attacked(tmp_path, 8, seed=0), at_least=2_000) == []


@pytest.mark.parametrize("code", ["pickle.loads(sys.stdin.buffer.read())", "exec('1')", "open('/etc/passwd')"])
def test_what_would_run_code_or_open_files_is_heard_by_the_watch(tmp_path, code):
    """Otherwise the silence of the others would prove nothing."""
    events = tmp_path / "events"
    (tmp_path / "harm.py").write_text(f"import pickle, sys\ndef main():\n    print('here')\n    {code}\n")
    process = [*WATCHED, str(events), "harm:main"]
    subprocess.run(process, input=PICKLE, cwd=Path.cwd(), env={"PYTHONPATH": str(tmp_path)}, check=True, timeout=150)
    heard = events_since(events, 0)
    word = {"p": "pickle.find_class ('builtins', 'exec')", "e": "compile (b'1'", "o": "open ('/etc/passwd'"}[code[0]]
    assert any(line.startswith(word) for line in heard)
    assert CANARY.exists() == code.startswith("pickle")
    CANARY.unlink(missing_ok=True)
