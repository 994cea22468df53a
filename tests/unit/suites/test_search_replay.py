"""Strategies replayed on the recorded spaces that are committed, and how spaces are recorded."""

import json
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from benchmarks import pairs, results_file, search, spaces
from benchmarks.inspected import inspected
from benchmarks.recorded import Recorded, line_of, outcome_of, rival_of, to_record
from kitsune.knobs import Choice
from tests.unit.tuner.machine import Machine, OneByOne, failure
from tests.unit.tuner.search.test_space import CPU, EVERYTHING
from tuner.measuring.protocol import ArmSpec, Job
from tuner.records import FailureKind, Trial
from tuner.search.proposal import Proposal
from tuner.search.space import Configuration, Space

COMMITTED = search.committed()
SMALL = next(path for path in COMMITTED if path.name == "lenet5-xeon.jsonl")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_space_can_be_replayed(path: Path) -> None:
    recorded = Recorded.load(path)
    assert all(recorded.space.allows(found.knobs) is None for found in recorded.outcomes.values())
    assert recorded.speedup({}) == 1
    assert recorded.optimum() >= 1


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_search_is_within_three_percent_after_twelve_trials(path: Path) -> None:
    recorded = Recorded.load(path)
    curves = [search.regrets(recorded, search.ours, 12, seed) for seed in range(7)]
    assert median(min(curve) for curve in curves) <= search.WITHIN
    assert median(search.trials_within(curve, search.WITHIN) for curve in curves) <= 12


def test_a_space_of_which_little_has_been_recorded_is_left_out(tmp_path: Path) -> None:
    lines = SMALL.read_text().splitlines()
    for name, count in (("begun", search.LEAST - 1), ("whole", len(lines))):
        kept = lines[: 1 + count]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(kept) + "\n")
    assert [path.stem for path in search.committed(tmp_path)] == ["whole"]


def test_no_strategy_repeats_itself_or_leaves_something_out() -> None:
    recorded = Recorded.load(SMALL)
    for strategy in search.STRATEGIES.values():
        tried = [frozenset(trial.knobs.items()) for trial in search.replayed(recorded, strategy, 100, 1)]
        assert tried[0] == frozenset()
        assert len(tried) == len(set(tried))
        assert set(tried) == set(recorded.outcomes)


def test_several_are_at_work_without_a_result() -> None:
    recorded = Recorded.load(SMALL)
    seen: list[tuple[int, int]] = []

    def watched(
        recorded: Recorded, trials: list[Trial], seed: int, pending: Sequence[Configuration]
    ) -> Proposal | None:
        seen.append((len(trials), len(pending)))
        return search.ours(recorded, trials, seed, pending)

    tried = [frozenset(trial.knobs.items()) for trial in search.replayed(recorded, watched, 10, 1, at_once=4)]
    assert seen[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]
    assert len(set(tried)) == 10
    found = {figure[0] for figure in search.figures("lenet5", recorded, seeds=1, at_once=4)}
    assert {name.partition(":")[0] for name in found} == {"lenet5/kitsune-4-at-once"}


def test_pairs_differ_in_one_choice_and_are_near_the_best() -> None:
    recorded = Recorded.load(SMALL)
    (precise,) = [each for each in recorded.outcomes.values() if each.knobs == {}]
    best = max(
        (each for each in recorded.outcomes.values() if each.failure is None), key=lambda o: recorded.speedup(o.knobs)
    )
    assert pairs.pairs(recorded, ("compile", "default")), "it is in what is best on a CPU"
    twins = {frozenset(): precise, frozenset({("compile", "default")}): best}
    two = replace(recorded, outcomes={key: replace(each, knobs=dict(key)) for key, each in twins.items()})
    assert pairs.pairs(two, ("compile", "default")) == [precise.ratio / best.ratio]
    assert pairs.pairs(two, ("precision", "bf16")) == []
    assert pairs.item_of("streams=4") == ("streams", 4)


def test_a_seed_gives_the_same_curve_and_another_seed_another() -> None:
    recorded = Recorded.load(SMALL)
    curves = [search.regrets(recorded, search.chance, 10, seed) for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]


def test_trials_are_counted_until_the_regret_stays_small() -> None:
    assert search.trials_within([0.5, 0.02, 0.01]) == 2
    assert search.trials_within([0.5, 0.02, 0.2, 0.0]) == 4
    assert search.trials_within([0.5, 0.4]) == 3
    assert search.trials_within([0.0]) == 1


def test_figures_name_space_strategy_and_what_is_told() -> None:
    found = {figure[0]: figure[1:] for figure in search.figures("lenet5", Recorded.load(SMALL), seeds=2)}
    assert {f"lenet5/{name}:trials-within-3%" for name in search.STRATEGIES} < set(found)
    assert found["lenet5/chance:regret@6"][1:] == ("ratio", 2)


def test_a_line_holds_what_was_measured_or_why_not() -> None:
    knobs: dict[str, Choice] = {"precision": "bf16"}
    job = Job(workload="zoo:mlp", device="cpu", arms=(ArmSpec(name="r"), ArmSpec(name="c", knobs=knobs)), rounds=12)
    measured = Machine(step_ms={"precision=bf16": 5.0}).measurement(0, job)
    line = json.loads(json.dumps(line_of(knobs, measured, 3.21)))
    found = outcome_of(line)
    assert found.knobs == knobs
    assert found.ratio == pytest.approx(0.5, rel=0.01)
    assert (line["took_s"], line["peak_bytes"], len(line["rival_ms"])) == (3.21, 1, len(line["step_ms"]))
    broken = outcome_of(json.loads(json.dumps(line_of(knobs, failure(kind=FailureKind.WRONG), 1.0))))
    assert broken.failure == failure(kind=FailureKind.WRONG)


def test_of_what_was_recorded_twice_a_measurement_stays(tmp_path: Path) -> None:
    head, *lines = SMALL.read_text().splitlines()
    measured = next(line for line in lines if "step_ms" in line)
    broken = {
        "kind": "configuration",
        "knobs": json.loads(measured)["knobs"],
        "failure": failure().model_dump(mode="json"),
    }
    out = tmp_path / "twice.jsonl"
    for each in ([measured, json.dumps(broken)], [json.dumps(broken), measured]):
        out.write_text("\n".join([head, *each]) + "\n")
        (found,) = Recorded.load(out).outcomes.values()
        assert found == outcome_of(json.loads(measured))


@pytest.mark.parametrize("space", [EVERYTHING, CPU])
def test_what_is_recorded_begins_with_presets_and_is_distinct_and_seeded(space: Space) -> None:
    found = to_record(space, 72, 0)
    assert found[0] == {}
    assert rival_of(space) in found
    assert len({frozenset(knobs.items()) for knobs in found}) == len(found)
    assert len(found) == min(72, len(list(space.configurations())))
    assert all(space.allows(knobs) is None for knobs in found)
    assert found == to_record(space, 72, 0)
    if space is EVERYTHING:
        assert found != to_record(space, 72, 1)
        assert sum(map(space.is_slow, found)) == 3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """On which spaces are recorded, in its own time."""
    machine = Machine(inapplicable=CPU.inapplicable)
    monkeypatch.setattr(
        spaces,
        "inspected",
        lambda workload, device: machine.inspect(Job(kind="inspect", workload=workload, device=device)),
    )
    monkeypatch.setattr(spaces, "Children", lambda *_, **__: closing(OneByOne(machine)))
    monkeypatch.setattr(spaces, "time", SimpleNamespace(monotonic=machine.clock))
    return machine


def recorded_by(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["spaces", *words])
    spaces.main()


def test_a_space_is_recorded_in_pieces(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mlp.jsonl"
    for count in ("3", "5"):
        recorded_by(monkeypatch, "mlp/64", "--out", str(out), "--count", count)
    assert spaces.recorded_in(out) == to_record(CPU, 5, 0)
    assert Recorded.load(out).workload == "zoo:mlp"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["rival"] == rival_of(CPU)
    first, second = (["environment", *count * ["configuration"]] for count in (3, 2))
    assert [line["kind"] for line in lines] == [*first, *second]
    with pytest.raises(SystemExit, match=r"mlp.jsonl is of zoo:mlp"):
        recorded_by(monkeypatch, "zoo:lenet5", "--out", str(out))


def test_a_workload_that_fails_as_given_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(outcome=failure("no such model"))
    crew = SimpleNamespace(begin=lambda *_: 0, finished=lambda _: answer)
    monkeypatch.setattr("benchmarks.inspected.Children", lambda *_: nullcontext(crew))
    with pytest.raises(SystemExit, match="zoo:mlp fails as given: no such model"):
        inspected("zoo:mlp", "cpu")


def test_what_a_piece_has_no_time_for_is_left_to_the_next(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.child_s = 25.0
    out = tmp_path / "mlp.jsonl"
    recorded_by(monkeypatch, "mlp/64", "--out", str(out), "--minutes", "1", "--count", "9")
    assert len(spaces.recorded_in(out)) == 3
    recorded_by(monkeypatch, "mlp/64", "--out", str(out), "--minutes", "9", "--count", "9")
    assert spaces.recorded_in(out) == to_record(CPU, 9, 0)


def test_what_ran_out_of_memory_beside_others_is_recorded_alone(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = OneByOne(machine)
    machine.answer = lambda _, job: failure(kind=FailureKind.OUT_OF_MEMORY) if len(crew.waiting) > 1 else None
    out = tmp_path / "mlp.jsonl"
    spaces.begun(out, "zoo:mlp", "cpu")
    spaces.Recorder(out, {}, {"workload": "zoo:mlp", "device": "cpu"}, crew, 3, machine.clock).record(
        to_record(CPU, 4, 0), 600.0
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert len(lines) == 4
    assert not any("failure" in line for line in lines)


def test_two_processes_record_a_space_from_both_ends(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mlp.jsonl"
    wanted = to_record(CPU, 5, 0)
    recorded_by(monkeypatch, "mlp/64", "--out", str(out), "--count", "1")

    def beside(*_: object) -> None:
        """What the other one records meanwhile."""
        if len(spaces.recorded_in(out)) == 1:
            line = {"kind": "configuration", "knobs": wanted[2], "failure": failure().model_dump(mode="json")}
            results_file.append(out, line)

    machine.answer = beside
    recorded_by(monkeypatch, "mlp/64", "--out", str(out), "--count", "5", "--backwards")
    assert spaces.recorded_in(out) == [wanted[each] for each in (0, 2, 4, 3, 1)]
