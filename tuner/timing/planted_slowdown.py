"""A process of `kitsune doctor --measure`: times a step, the same step again, and the step with known slowdowns.

`python -m tuner.timing.planted_slowdown DEVICE SEED` imports torch, waits for a line on stdin, and writes one
Measurement as JSON to stdout. Clock, rounds and watches are those of a trial. The step keeps the device busy, so that a
wait added on the device lengthens the step by exactly that wait.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from kitsune.device.backend import environment, make_current, pick_device
from tuner.records import Arm, Measurement
from tuner.statistics.process_statistics import ROUNDS
from tuner.timing.checkup import PLANTED, STEP
from tuner.timing.clock import clock_of, watches_of
from tuner.timing.interleaved_rounds import BlockClock, RoundSchedule, Step, one_round, time_arms, warm_up

BLOCK_MS = 20.0
WARM_S = 0.5
WIDTH = {"cpu": 512, "cuda": 2048}  # about 10 ms a step on two cores; on a GPU two waves of 128x128 tiles on 132 SMs
LAYERS = 3
CALIBRATION_CYCLES = 20_000_000  # 11 ms at 1.8 GHz
CALIBRATIONS = 5

Wait = Callable[[float], Step]


def measured(device: torch.device, seed: int = 0) -> Measurement:
    """Times the step and every arm of PLANTED, interleaved."""
    make_current(device)
    torch.manual_seed(seed)
    clock, watches, step = clock_of(device), watches_of(device), a_step(device)
    schedule = RoundSchedule(rounds=ROUNDS, block_ms=BLOCK_MS, warm_s=WARM_S, seed=seed)
    begin_s = clock.now_s()
    clock.block_ms(step, 1)
    first_step_s = clock.now_s() - begin_s
    step_ms = as_given_ms(step, clock, schedule)
    wait = waits(device, clock, step, step_ms)
    slower = [both(step, wait(share * step_ms)) if share else step for share in PLANTED.values()]
    timing = time_arms([step, *slower], clock, watches, replace(schedule, warm_s=0), lambda *_: False)
    return Measurement(
        arms=tuple(
            Arm(name=name, knobs={}, step_ms=times, peak_bytes=0, first_step_s=first_step_s)
            for name, times in zip((STEP, *PLANTED), timing.step_ms, strict=True)
        ),
        steps_per_block=timing.steps_per_block,
        dropped_rounds=timing.dropped_rounds,
        disturbed=timing.disturbed,
        causes=timing.causes,
        notes=timing.notes,
        environment=environment(device),
    )


def a_step(device: torch.device) -> Step:
    """Forward, backward and update of a few square linear layers, whose products keep the whole device busy."""
    width = WIDTH[device.type]
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(width, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def as_given_ms(step: Step, clock: BlockClock, schedule: RoundSchedule) -> float:
    """Median ms per step of as many blocks as there are rounds, after warm-up."""
    counts = warm_up([step], clock, schedule)
    return median([one_round([0], [step], counts, clock)[0] for _ in range(schedule.rounds)])


def waits(device: torch.device, clock: BlockClock, step: Step, step_ms: float) -> Wait:
    """A function from milliseconds to a wait of that length: a sleep kernel on a GPU, a busy loop on a CPU.

    The kernel counts clock cycles, and a GPU under load runs at a lower clock than an idle one. So it is calibrated
    directly after the step.
    """
    if device.type != "cuda":
        return spin
    sleep: Callable[[int], None] = torch.cuda._sleep
    waiting = both(step, lambda: sleep(CALIBRATION_CYCLES))
    took_ms = median([clock.block_ms(waiting, 1) for _ in range(CALIBRATIONS)]) - step_ms
    return lambda wait_ms: lambda: sleep(round(wait_ms * CALIBRATION_CYCLES / took_ms))


def spin(wait_ms: float) -> Step:
    def wait() -> None:
        end_ns = time.perf_counter_ns() + wait_ms * 1e6
        while time.perf_counter_ns() < end_ns:
            pass

    return wait


def both(first: Step, second: Step) -> Step:
    def step() -> None:
        first()
        second()

    return step


if __name__ == "__main__":
    sys.stdin.readline()
    found = measured(pick_device(sys.argv[1] or None), int(sys.argv[2]))
    sys.stdout.write(found.model_dump_json())
