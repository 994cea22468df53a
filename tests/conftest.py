"""What holds for every test: no touch of the user's own Kitsune, GPU tests only on a GPU, no quiet skips in CI."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

#: An example that took long has met a busy machine. In CI hypothesis says so by itself.
#: Fifty at a time, as every run has others; a property that needs more says how many.
settings.register_profile(
    "patient", settings.default, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

GPU_TESTS = Path(__file__).parent / "gpu"
NVIDIA_SIGNS = [Path(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")]


@cache
def has_gpu() -> bool:
    if not any(sign.exists() for sign in NVIDIA_SIGNS):  # spares most machines the seconds that torch takes to load
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


if not has_gpu():
    # Triton's interpreter carries out kernels on the CPU. Triton asks when it is imported, which other conftests do.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Whoever starts the tests in the background of a shell has SIGINT ignored, and some are about Ctrl-C.

    What Inductor makes for a CPU is without vectors: it is compiled in two thirds of the time, and no test is about its
    speed.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.fixture(autouse=True)
def kitsune_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A KITSUNE_HOME of the test's own, with no other KITSUNE_ variable set."""
    for name in [name for name in os.environ if name.startswith("KITSUNE_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "kitsune-home"
    monkeypatch.setenv("KITSUNE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def backwards_on_their_own_thread() -> Iterator[None]:
    """A test may end between a replayed forward and its update, where backwards run on the calling thread."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch._C._is_multithreading_enabled():
        torch.autograd.set_multithreading_enabled(True)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Garbage is no longer looked for among what was loaded by now: with all of torch that takes 0.3 s each time.

    The first optimizer of a process loads half of that, and then every walk over all tensors would go through it.
    """
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if not collector.path.is_relative_to(GPU_TESTS):
        refuse_skip(report)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """In CI a missing PostgreSQL, browser or package is a failure: a skipped test has shown nothing."""
    if report.skipped and os.environ.get("CI", "") not in ("", "0", "false"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept outside tests/gpu: {reason}"
