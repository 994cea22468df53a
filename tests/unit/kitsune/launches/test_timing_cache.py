"""What is told apart where the timings of a step are kept, where that is, and what is not measured again."""

import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kitsune.base.compile_cache import compiled_folder, usual_folder
from kitsune.base.file_cache import KeyedFiles
from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.capture.step_body import Body
from kitsune.capture.step_graph import StepGraph
from kitsune.device.cuda_graph import Recorder
from kitsune.device.tf32 import tf32_products
from kitsune.errors import CaptureError
from kitsune.launches.pipeline import check_kernels
from kitsune.launches.plan_race import PlanRace
from kitsune.launches.timing_cache import FOLDER, TimingCache, key_of, stable_text
from kitsune.update.optimizer_update import Update
from tests.unit.kitsune.launches.steps import CPU, even_us, recorded

IMAGES, KERNELS = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
QUERIES = torch.randn(2, 2, 8, 4)
MATRIX = torch.randn(8, 8)
LARGER = torch.randn(16, 8)


def without_gradients():
    with torch.no_grad():
        return MATRIX.sin()


ALIKE = {
    "shape": (lambda: MATRIX[:4] @ MATRIX, lambda: MATRIX @ MATRIX[:, :4]),
    "dtype": (lambda: MATRIX.half().sin(), lambda: MATRIX.bfloat16().sin()),
    "memory format": (
        lambda: torch.sin(IMAGES).contiguous(),
        lambda: torch.sin(IMAGES.contiguous(memory_format=torch.channels_last)).contiguous(),
    ),
    "number": (lambda: MATRIX * 2.0, lambda: MATRIX * 3.0),
    "named argument": (lambda: F.gelu(MATRIX), lambda: F.gelu(MATRIX, approximate="tanh")),
    "whether gradients are on": (MATRIX.sin, without_gradients),
    "memory that it is part of": (MATRIX.sin, LARGER[:8].sin),
    "dilation": (
        lambda: F.conv2d(IMAGES, KERNELS, padding=1),
        lambda: F.conv2d(IMAGES, KERNELS, padding=2, dilation=2),
    ),
    "mask": (
        lambda: F.scaled_dot_product_attention(QUERIES, QUERIES, QUERIES),
        lambda: F.scaled_dot_product_attention(QUERIES, QUERIES, QUERIES, is_causal=True),
    ),
}


def product():
    return (MATRIX @ MATRIX).relu()


def key(step=product, streams=4, pool_bytes=None):
    return key_of(recorded(step), streams, pool_bytes)


@pytest.mark.parametrize("what", ALIKE)
def test_steps_of_other_launches_have_other_keys(what):
    one, other = ALIKE[what]
    assert key(one) == key(one) != key(other)


def test_so_have_other_limits():
    assert len({key(), key(streams=2), key(pool_bytes=2**24), key(pool_bytes=2**25)}) == 4


def test_another_torch_other_rules_and_another_precision_have_other_keys(monkeypatch):
    found = [key()]
    for name, value in (("torch.__version__", "1.0"), ("kitsune.launches.timing_cache.RULES", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found.append(key())
    with tf32_products():
        found.append(key())
    assert len(set(found)) == 4
    assert key() == found[0]


def test_so_has_another_gpu(monkeypatch):
    there = replace(recorded(product), device=torch.device("cuda", 0))
    keys = set()
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        keys.add(key_of(there))
    assert len(keys | {key_of(recorded(product))}) == 3


def test_what_has_no_lasting_text_is_told_by_its_type():
    assert stable_text([torch.Generator(), {"a": (1, None)}]) == "(Generator, (('a', (1, None))))"


def test_it_is_kept_beside_what_torch_has_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiled_folder() == tmp_path
    assert TimingCache.of_this_machine().files.folder == tmp_path / FOLDER
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert compiled_folder() == usual_folder()
    assert usual_folder().parent == Path(tempfile.gettempdir())


def untimed(_):
    raise AssertionError("it was measured before")


def test_launches_are_timed_once(tmp_path):
    recording, cache = recorded(product), TimingCache(KeyedFiles(tmp_path))
    times_us = [1.25, 1 / 3][: len(recording.calls)]
    assert cache.costs_us(recording, lambda _: times_us) == times_us
    assert TimingCache(KeyedFiles(tmp_path)).costs_us(recorded(product), untimed) == times_us


def test_of_two_that_time_them_at_once_the_first_is_right_for_both(tmp_path):
    recording, cache = recorded(product), TimingCache(KeyedFiles(tmp_path))
    count = len(recording.calls)

    def as_another_does_too(_):
        cache.costs_us(recording, lambda _: [2.0] * count)
        return [3.0] * count

    assert cache.costs_us(recording, as_another_does_too) == cache.costs_us(recording, untimed) == [2.0] * count


@pytest.mark.parametrize("told", [b"", b"1.0", b"1.0 x", b"1.0 -1.0", b"1.0 nan", b"1.0 inf", b"\xff\xfe"])
def test_what_are_no_times_of_its_launches_is_measured_again(tmp_path, told):
    recording, cache = recorded(product), TimingCache(KeyedFiles(tmp_path))
    assert len(recording.calls) == 2
    cache.costs_us(recording, lambda _: [2.0, 2.0])
    (file,) = tmp_path.iterdir()
    file.write_bytes(told)
    assert cache.costs_us(recording, lambda _: [3.0, 3.0]) == [3.0, 3.0]
    assert cache.costs_us(recording, untimed) == [3.0, 3.0], "it is kept in its place"


def test_a_step_of_thousands_of_launches_is_kept(tmp_path):
    def many():
        value = MATRIX
        for _ in range(3000):
            value = value.sin()
        return value

    recording, cache = recorded(many), TimingCache(KeyedFiles(tmp_path))
    times_us = [number / 7 for number in range(len(recording.calls))]
    assert len(times_us) == 3000
    cache.costs_us(recording, lambda _: times_us)
    assert cache.costs_us(recording, untimed) == times_us


def test_nowhere_to_keep_them_costs_a_measurement(tmp_path):
    (tmp_path / "file").touch()
    recording, cache = recorded(product), TimingCache(KeyedFiles(tmp_path / "file" / "timings"))
    for times_us in ([1.0, 2.0], [3.0, 4.0]):
        assert cache.costs_us(recording, lambda _, times_us=times_us: times_us) == times_us


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A recording as if it were made there, and a list of what the profiler looked at."""
    looks = []

    def kernels_of(step):
        looks.append("kernels")
        return Counter(step())

    def issued():
        looks.append("issued")
        return ["product", "relu"]

    def costs_of(recording):
        looks.append("launches")
        return [1.0] * len(recording.calls)

    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    nothing = nullcontext(SimpleNamespace(restore=lambda: None))
    monkeypatch.setattr("kitsune.launches.model.recording.Recording.saved_state", lambda _: nothing)
    monkeypatch.setattr("kitsune.launches.pipeline.in_recorded_order", lambda _: issued)
    monkeypatch.setattr("kitsune.launches.pipeline.kernels_of", kernels_of)
    monkeypatch.setattr("kitsune.launches.plan_race.costs_of", costs_of)
    return replace(recorded(product), device=torch.device("cuda", 0)), looks


def look(recording, cache, launched=("product", "relu")):
    check_kernels(recording, lambda: launched, cache)
    assert PlanRace(Recorder(CPU), 4, None, cache).costs_us(recording) == [1.0, 1.0]


def test_the_next_process_needs_no_profiler(on_a_gpu, tmp_path):
    recording, looks = on_a_gpu
    once = ["kernels", "kernels", "issued", "launches"]
    for _ in range(2):
        look(recording, TimingCache(KeyedFiles(tmp_path)))
    assert looks == [*once, "issued"], "so that libraries are set up before the capture"
    looks.clear()
    for _ in range(2):
        look(recording, None)
    assert looks == 2 * once


def test_a_broken_word_on_the_kernels_is_no_word(on_a_gpu, tmp_path):
    recording, looks = on_a_gpu
    look(recording, TimingCache(KeyedFiles(tmp_path)))
    (file,) = tmp_path.glob("*.kernels")
    file.write_text("")
    looks.clear()
    look(recording, TimingCache(KeyedFiles(tmp_path)))
    assert looks == ["kernels", "kernels", "issued"]


def test_a_step_that_launches_what_was_not_recorded_is_refused_each_time(on_a_gpu, tmp_path):
    recording, _ = on_a_gpu
    for _ in range(2):
        with pytest.raises(CaptureError, match="1 kernels are launched without being recorded"):
            look(recording, TimingCache(KeyedFiles(tmp_path)), launched=("product", "relu", "hidden"))


def planners(monkeypatch, where):
    made = []

    def planner(*arguments):
        made.append(arguments)
        raise RuntimeError("that is all")

    monkeypatch.setattr(f"kitsune.capture.{where}.Planner", planner)
    return made


@pytest.mark.parametrize("where", ["step_graph", "forward_dispatch"])
def test_a_training_asks_for_it(monkeypatch, where):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    made = planners(monkeypatch, where)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    body = Body(model, lambda x, y: F.mse_loss(model(x), y), Update(optimizer))
    step = StepGraph(body, Recorder(CPU), CPU, None, 3)
    forward = SegmentedForward(model, optimizer, model, model, CPU, capture=True, streams=3)

    def train():
        for _ in range(6):
            x, y = torch.randn(2, 8), torch.randn(2, 4)
            if where == "step_graph":
                step((x, y))
            else:
                optimizer.zero_grad()
                F.mse_loss(forward(x), y).backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="that is all"):
        train()
    assert made[0][3] == TimingCache.of_this_machine()
