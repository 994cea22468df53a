"""Coordinate descent leaves short kernels as they are: by torch's own autotuner, with launches and times made up."""

import types

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.runtime import coordinate_descent_tuner, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from torch.nn import functional as F

from kitsune import Plan, TrainStep
from kitsune.techniques import long_kernels
from kitsune.techniques.compile import options_of
from kitsune.techniques.long_kernels import LEAST_MS, SWITCH, leave_short_kernels
from tests.step_cases import sgd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch's compiler

MARKED = {SWITCH: LEAST_MS}
OF_A_USER = {SWITCH: True}
SHORT_MS, LONG_MS = LEAST_MS / 2, LEAST_MS * 2
BLOCK = 256  # elements of a program in the configuration that a kernel starts with


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No kernel is in torch's caches, and the tuner is torch's own until `leave_short_kernels`."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # with it Inductor tunes nothing
    counters.clear()
    monkeypatch.setattr(coordinate_descent_tuner.CoordescTuner, "autotune", torch_autotune())
    leave_short_kernels.cache_clear()
    yield
    leave_short_kernels.cache_clear()


def torch_autotune():
    given = coordinate_descent_tuner.CoordescTuner.autotune
    return getattr(given, "__wrapped__", given)


def launcher_of(config):
    def launch(*args, stream):
        launch.launches += 1

    launch.config, launch.launches = config, 0
    launch.n_spills, launch.n_regs, launch.shared = 0, 16, 0
    launch.store_cubin, launch.cache_hash = False, "of no kernel"
    return launch


class Kernel(triton_heuristics.CachingAutotuner):
    """One kernel of Inductor, as a new process finds it. It is faster in larger blocks; nothing is compiled."""

    def __init__(self, folder, meta, block_ms, heuristic_type=HeuristicType.POINTWISE):
        filename, self.block_ms, self.measured = str(folder / "kernel.py"), block_ms, []
        config = triton_heuristics.Config({"XBLOCK": BLOCK}, num_warps=4, num_stages=1)
        configs, cache, _ = triton_heuristics.check_autotune_cache([config], filename, dict(meta))
        super().__init__(
            types.SimpleNamespace(__name__="triton_poi_fused_0", src="def triton_poi_fused_0(): pass", fn=len),
            {"device": DeviceProperties("cuda", 0, 132, 90, warp_size=32, max_threads_per_block=1024)},
            configs,
            cache.save,
            [],
            optimize_mem=False,
            heuristic_type=heuristic_type,
            size_hints={"x": 2**20},
            inductor_meta=dict(meta),
            filename=filename,
        )
        self.launchers = [launcher_of(configs[0])]

    def _precompile_config(self, config):
        return types.SimpleNamespace(make_launcher=lambda: launcher_of(config))

    def bench(self, launcher, *args, **kwargs):
        self.measured.append(launcher.config.kwargs["XBLOCK"])
        return self.block_ms * BLOCK / launcher.config.kwargs["XBLOCK"]

    def run_twice(self):
        for _ in range(2):
            self.run(stream=0)
        (launcher,) = self.launchers
        return launcher


def test_a_long_kernel_is_tuned(tmp_path):
    leave_short_kernels()
    kernel = Kernel(tmp_path, MARKED, LONG_MS)
    assert kernel.run_twice().config.kwargs["XBLOCK"] > BLOCK
    assert kernel.measured.count(BLOCK) < len(kernel.measured)
    assert len(kernel.measured) == benches()


def test_a_short_kernel_is_measured_once_and_stays_as_it_is(tmp_path):
    leave_short_kernels()
    kernel = Kernel(tmp_path, MARKED, SHORT_MS)
    launcher = kernel.run_twice()
    assert (launcher.config.kwargs["XBLOCK"], launcher.launches) == (BLOCK, 2)
    assert launcher.config.found_by_coordesc, "so that the next launch does not ask again"
    assert (kernel.measured, benches()) == ([BLOCK], 1)


@pytest.mark.parametrize("block_ms", [SHORT_MS, LONG_MS])
def test_the_next_process_measures_nothing(tmp_path, block_ms):
    leave_short_kernels()
    first = Kernel(tmp_path, MARKED, block_ms).run_twice()
    next_one = Kernel(tmp_path, MARKED, block_ms)
    assert next_one.run_twice().config.kwargs == first.config.kwargs
    assert next_one.measured == []


def test_a_kernel_that_spills_is_tuned(tmp_path):
    leave_short_kernels()
    kernel = Kernel(tmp_path, MARKED, float("inf"))
    kernel.run_twice()
    assert len(kernel.measured) > 1


def test_short_kernels_of_the_user_are_tuned_as_before(tmp_path):
    before = Kernel(tmp_path / "before", OF_A_USER, SHORT_MS)
    before.run_twice()
    leave_short_kernels()
    after = Kernel(tmp_path / "after", OF_A_USER, SHORT_MS)
    assert after.run_twice().config.kwargs["XBLOCK"] > BLOCK
    assert after.measured == before.measured


@pytest.mark.parametrize("kind", [HeuristicType.TEMPLATE, HeuristicType.USER_AUTOTUNE])
def test_kernels_that_torch_never_tunes_are_not_measured(tmp_path, kind):
    leave_short_kernels()
    kernel = Kernel(tmp_path, MARKED, LONG_MS, kind)
    assert kernel.run_twice().launches == 2
    assert kernel.measured == []


@pytest.mark.parametrize("lacking", ["CoordescTuner", "CoordescTuner.autotune", "CoordescTuner.call_func"])
def test_with_another_tuner_of_torch_nothing_is_changed(monkeypatch, lacking):
    monkeypatch.delattr(f"{coordinate_descent_tuner.__name__}.{lacking}")
    before = dict(vars(triton_heuristics.CoordescTuner))
    leave_short_kernels()
    assert dict(vars(triton_heuristics.CoordescTuner)) == before


def test_without_a_tuner_in_torch_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(long_kernels, "TUNER", "torch._inductor.of_another_version")
    before = triton_heuristics.CoordescTuner.autotune
    leave_short_kernels()
    assert triton_heuristics.CoordescTuner.autotune is before


def test_the_choice_marks_its_kernels_and_torchs_modes_do_not():
    assert options_of("coordinate-descent")[SWITCH] == LEAST_MS
    assert {options_of(mode).get(SWITCH) for mode in ("max-autotune", "max-autotune-no-cudagraphs")} == {True}


def test_inductor_writes_the_mark_into_its_kernels(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "of no GPU")
    with inductor_config.patch(options_of("coordinate-descent")):
        assert TritonKernel.inductor_meta_common()[SWITCH] == LEAST_MS


def test_a_step_with_the_choice_is_the_same_training_on_a_cpu():
    torch._dynamo.reset()
    before = triton_heuristics.CoordescTuner.autotune
    plain, _ = trained()
    losses, report = trained(compile="coordinate-descent")
    assert losses == pytest.approx(plain)
    assert report.applied == {"compile": "coordinate-descent"}
    assert triton_heuristics.CoordescTuner.autotune is not before, "put in place by what compiles"


def trained(**knobs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), Plan.by_hand(**knobs)) as step:
        return [step(torch.ones(4, 8), torch.zeros(4, 4)).item() for _ in range(3)], step.report


def benches():
    return counters["inductor"]["coordesc_tuning_bench"]
