"""The demo: tunes the small CNN of train_cnn.py on this machine, then trains it by the plan and as written.

python examples/demo.py                 ends in a few minutes on two CPU cores
python examples/demo.py --trials 20     searches longer
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from train_cnn import batches, make_model, train

import kitsune
from tuner.api import Result, tune_workload
from tuner.records import Source
from tuner.statistics.plan_evidence import words
from tuner.tuning.events import Confirming, Event, PlayingOff, Tried, Trying

STEPS = 50
BLOCK_S = 0.2
WARM_STEPS = 8
ROUNDS = 7
#: How far the mean loss of the last ten steps may be from the plain one's, by the plan's precision.
TOLERANCE = {"fp32": 0.02, "tf32": 0.03, "bf16": 0.08, "fp16": 0.08}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--budget", help="a time such as 3m, in place of a number of trials")
    options = parser.parse_args()
    here = Path(__file__).parent
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    print(f"Tuning the training step of a small CNN on {device}.\n")
    result = tune_workload(
        f"{here / 'train_cnn.py'}:make_workload",
        device=device,
        trials=None if options.budget else options.trials,
        budget=options.budget,
        ablation=False,
        tell=tell,
    )
    show(result)
    fits = compare_training(result.plan, device)
    compare_speed(result.plan, device)
    return 0 if fits else 1


def tell(event: Event) -> None:
    if isinstance(event, Trying):
        of = f" of {event.total}" if event.total else ""
        print(f"  trial {event.number + 1}{of}: {words(event.proposal.knobs)} ...", flush=True)
    elif isinstance(event, PlayingOff):
        print(f"  the best {len(event.contenders)} against each other: the winner ...", flush=True)
    elif isinstance(event, Confirming):
        print(f"  measured afresh: {words(event.knobs)} ...", flush=True)
    elif isinstance(event, Tried):
        trial = event.trial
        if trial.failure is not None:
            print(f"      failed ({trial.failure.kind}): {trial.failure.reason}", flush=True)
        elif trial.comparison is not None:
            speedup = trial.comparison.speedup
            over = "the best stock configuration" if trial.source is Source.CONFIRM else "the step as given"
            print(
                f"      {speedup.median:.2f}x over {over} ({speedup.low:.2f} to {speedup.high:.2f}):"
                f" {trial.comparison.verdict}",
                flush=True,
            )


def show(result: Result) -> None:
    evidence = result.plan.evidence
    assert evidence is not None
    print(f"\nVerdict: {evidence.verdict}. The plan: {words(result.plan.knobs)}")
    print(f"  best stock configuration ({evidence.baseline}): {evidence.baseline_step_ms:.3f} ms a step")
    print(f"  by the plan: {evidence.step_ms:.3f} ms, as given: {evidence.eager_step_ms:.3f} ms")
    print(f"  run {result.run.id}, plan {result.plan.plan_id[:16]}")


def compare_training(plan: kitsune.Plan, device: str) -> bool:
    """Trains both ways from the same seed on the same data; says whether the ends meet."""
    plain, tuned = train(STEPS, None, device), train(STEPS, plan, device)
    ends = statistics.mean(plain[-10:]), statistics.mean(tuned[-10:])
    tolerance = TOLERANCE[str(plan.choice("precision"))]
    print(f"\nTraining {STEPS} steps from the same seed: loss {plain[0]:.3f} at the first step, then")
    print(f"  plain {ends[0]:.4f}, by the plan {ends[1]:.4f} (mean of the last ten; tolerance {tolerance})")
    fits = abs(ends[0] - ends[1]) <= tolerance
    print("  the same within the tolerance" if fits else "  NOT the same: please report this")
    return fits


def compare_speed(plan: kitsune.Plan, device: str) -> None:
    """Times both ways in this process, in alternating blocks."""
    x, y = next(batches(1, device))
    steps: dict[str, kitsune.TrainStep] = {}
    for name, chosen in (("plain", None), ("by the plan", plan)):
        model = make_model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        steps[name] = kitsune.TrainStep(model, torch.nn.functional.cross_entropy, optimizer, chosen)
        block_ms(steps[name], x, y, WARM_STEPS)
    count = max(WARM_STEPS, int(BLOCK_S * 1e3 / block_ms(steps["plain"], x, y, WARM_STEPS)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(block_ms(step, x, y, count))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("\nSteps in this process, alternating blocks:")
    for name, values in times.items():
        print(f"  {name:12} {medians[name]:8.3f} ms a step (from {min(values):.3f} to {max(values):.3f})")
    print(f"  {medians['plain'] / medians['by the plan']:.2f}x")


def block_ms(step: kitsune.TrainStep, x: torch.Tensor, y: torch.Tensor, count: int) -> float:
    """Milliseconds a step, over so many steps at a stretch."""
    begin = time.perf_counter()
    for _ in range(count):
        loss = step(x, y)
    loss.item()
    return (time.perf_counter() - begin) / count * 1e3


if __name__ == "__main__":
    os.environ.setdefault("KITSUNE_HOME", str(Path(__file__).parent.parent / ".kitsune"))
    try:
        raise SystemExit(main())
    except kitsune.KitsuneError as error:
        raise SystemExit(f"The demo stopped: {error}") from error
