import json
import math
from random import Random
from statistics import median

import pytest
import torch

from kitsune.cli import main
from tests.unit.tuner.machine import ENVIRONMENT
from tests.unit.tuner.noise import MODELS, Noise
from tuner.records import Arm, Measurement, Verdict
from tuner.statistics.block_statistics import order
from tuner.timing import checkup, planted_slowdown
from tuner.timing.checkup import PLANTED, STEP
from tuner.timing.planted_slowdown import measured, spin, waits


def machine(noise: Noise, *, bias: float = 0.0, sleepless: bool = False, run: int = 0):
    """What its processes measure: `bias` slows it down against itself; `sleepless`, nothing planted does."""

    def measure(_device, seed):
        rng = Random(f"{run} {seed}")
        drawn = noise(rng, order(10, len(PLANTED) + 1, seed))
        longer = [0.0, *(bias + (0 if sleepless else share) for share in PLANTED.values())]
        arms = tuple(
            Arm(
                name=name,
                knobs={},
                step_ms=tuple(10 * (1 + more) * math.exp(value) for value in values),
                peak_bytes=0,
                first_step_s=0,
            )
            for name, more, values in zip((STEP, *PLANTED), longer, drawn, strict=True)
        )
        return Measurement(arms=arms, steps_per_block=(1,) * len(arms), environment=ENVIRONMENT, notes=("seen",))

    return measure


def claimed(**changes):
    found = checkup.checkup("cpu", machine(**changes))
    return [claim.verdict for claim in found.claims], found


def test_a_quiet_machine_finds_what_is_planted_and_nothing_else():
    said, found = claimed(noise=MODELS["iid 0.3 %"])
    assert said == [Verdict.SAME, Verdict.SLOWER, Verdict.SLOWER]
    assert all(claim.is_right for claim in found.claims)
    assert [round(1 / claim.speedup.median - 1, 3) for claim in found.claims] == pytest.approx(
        [0, 0.01, 0.03], abs=2e-3
    )
    assert 0.005 < found.smallest_gain < 0.01
    assert (found.processes, found.rounds, found.notes) == (5, 10, ("seen",))


def test_where_processes_differ_a_small_slowdown_is_not_found_and_the_smallest_gain_says_so():
    said, found = claimed(noise=MODELS["offset by process, 1 %"], run=1)
    assert said[0] in (Verdict.SAME, Verdict.AMBIGUOUS)
    assert not found.claims[1].is_right
    assert 0.01 < found.smallest_gain < 0.1


def test_a_noisy_machine_is_reported_with_advice(capsys, monkeypatch):
    monkeypatch.setattr(checkup, "measure", machine(MODELS["bursts of 2 blocks"]))
    wild = machine(lambda rng, turns: [[40 * value for value in arm] for arm in MODELS["iid 1 %"](rng, turns)])
    found = checkup.checkup(None, wild)
    assert [claim.verdict for claim in found.claims] == [Verdict.TOO_NOISY] * 3
    told = checkup.checkup_screen(found)
    assert told[3].startswith("Too noisy to tell: blocks of the step lay ")
    assert told[3].endswith("kitsune doctor --measure shows what this machine can tell.")


def call(monkeypatch, capsys, measure, *words):
    monkeypatch.setattr(checkup.checkup, "__defaults__", (measure,))
    code = main.run(["doctor", "--measure", *words])
    return code, *capsys.readouterr()


def test_the_command(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, machine(MODELS["iid 0.3 %"]))
    assert code == 0
    assert "about a minute" in err
    lines = out.splitlines()
    assert lines[2].split()[:3] == ["nothing", "same", "right"]
    assert lines[3].split()[:4] == ["1%", "slower", "slower", "right"]
    assert "Processes lie 0." in out


def test_a_false_claim_is_a_machine_that_does_not_fit(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, machine(MODELS["iid 0.3 %"], bias=0.05), "--json")
    told = json.loads(out)
    assert code == 3
    assert [claim["verdict"] for claim in told["claims"]] == ["slower"] * 3
    assert told["processes"] == 5
    code, out, _ = call(monkeypatch, capsys, machine(MODELS["iid 0.3 %"], sleepless=True))
    assert code == 3
    assert [line.split()[-8] for line in out.splitlines()[2:5]] == ["right", "found", "WRONG"]


def test_device_is_accepted_with_measure_only(capsys):
    assert main.run(["doctor", "--device", "cpu"]) == 2
    assert "needs --measure" in capsys.readouterr().err


def test_a_process_times_the_step_and_what_is_planted(monkeypatch):
    monkeypatch.setitem(planted_slowdown.WIDTH, "cpu", 64)
    monkeypatch.setattr(planted_slowdown, "WARM_S", 0.01)
    monkeypatch.setattr(planted_slowdown, "BLOCK_MS", 2.0)
    found = measured(torch.device("cpu"))
    assert [arm.name for arm in found.arms] == [STEP, *PLANTED]
    assert {len(arm.step_ms) for arm in found.arms} == {10}
    assert found.environment.device == "cpu"
    assert any("load average" in note or "not watched" in note for note in found.notes)


def test_a_wait_on_the_host_takes_as_long_as_it_says():
    clock = planted_slowdown.clock_of(torch.device("cpu"))
    wait = waits(torch.device("cpu"), clock, lambda: None, 1.0)
    assert wait is spin
    took = [clock.block_ms(wait(2.0), 1) for _ in range(9)]
    assert min(took) >= 2.0
    assert median(took) < 20
