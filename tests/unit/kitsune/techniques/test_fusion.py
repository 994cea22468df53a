"""The knob fusion: when it applies, and what it makes of a step beside compile=off and compile=default."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from kitsune.fusion import FusionConfig, FusionEngine
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques import TECHNIQUES, Build, Facts, why_not
from kitsune.techniques.compile import Inductor, options_of
from tests.step_cases import sgd
from tests.unit.kitsune.fusion.fused import ROWS, Activated, Norm, always_faster, step

CPU = torch.device("cpu")
GPU = Facts(device="cuda", compute_capability=(9, 0))


@pytest.fixture
def fusing(monkeypatch):
    """Whatever is found is fused, on a CPU too."""
    monkeypatch.setattr(FusionEngine, "_clock_for", lambda self, graph: always_faster)
    torch._dynamo.reset()


def build_of(model, config=None):
    return Build(
        model=model,
        optimizer=sgd(model.parameters()),
        device=CPU,
        forward=model,
        undo=contextlib.ExitStack(),
        fusion_config=config,
    )


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(Norm(), Activated())


def assert_same_step(build, model):
    plain = copy.deepcopy(model)
    ours, wanted = step(build.forward, list(model.parameters()), ROWS), step(plain, list(plain.parameters()), ROWS)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_it_needs_a_gpu_and_triton():
    assert why_not("fusion", "kitsune", GPU) is None
    assert why_not("fusion", "kitsune", Facts(device="cpu")) == "Kitsune's kernels need a GPU"
    no_triton = Facts(device="cuda", compiler="torch.compile needs Triton on a GPU: pip install triton")
    assert "Triton" in why_not("fusion", "kitsune", no_triton)


def test_it_stands_before_compile_which_begins_from_the_step_without_it():
    assert list(KNOBS).index("attention") < list(KNOBS).index("fusion") == list(KNOBS).index("compile") - 1


def test_on_a_cpu_it_is_declined_and_the_step_trains():
    model = model_of()
    trained = TrainStep(model, nn.functional.mse_loss, sgd(model.parameters()), plan=Plan.by_hand(fusion="kitsune"))
    assert torch.isfinite(trained(ROWS.detach(), torch.zeros(2, 3, 16)))
    assert trained.report.declined == {"fusion": "Kitsune's kernels need a GPU"}


def test_alone_the_rest_runs_eagerly(fusing):
    model = model_of()
    build = build_of(model)
    TECHNIQUES["fusion"].apply("kitsune", build)
    assert_same_step(build, model)
    assert build.fusion.compiler == "eager"
    assert build.fusion.get_fusion_stats().matches == {"layer_norm": 1, "linear_activation": 1}


def test_of_products_only_the_rest_is_left_to_the_compiler(fusing):
    build = build_of(model_of())
    TECHNIQUES["fusion"].apply("products", build)
    assert (build.fusion.config.enable_elementwise, build.fusion.config.enable_reduction) == (False, False)
    assert build.fusion.config.enable_matmul


def test_of_products_only_what_the_user_forbids_stays_forbidden(fusing):
    build = replace(build_of(model_of()), fusion_config=FusionConfig(enable_matmul=False, max_fusion_size=3))
    TECHNIQUES["fusion"].apply("products", build)
    assert (build.fusion.config.enable_matmul, build.fusion.config.max_fusion_size) == (False, 3)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_beside_compile_inductor_gets_the_graph_with_our_kernels(fusing, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    model = model_of()
    build = build_of(model, FusionConfig(max_fusion_size=32, enable_elementwise=False))
    for knob, choice in {"fusion": "kitsune", "compile": "default"}.items():
        TECHNIQUES[knob].apply(choice, build)
    assert_same_step(build, model)
    assert (build.fusion.compiler, build.fusion.config.max_fusion_size) == ("inductor", 32)
    assert build.fusion.get_fusion_stats().matches == {"layer_norm": 1}
    torch.compiler.reset()
    counters.clear()
    again = build_of(model, build.fusion_config)
    for knob, choice in {"fusion": "kitsune", "compile": "default"}.items():
        TECHNIQUES[knob].apply(choice, again)
    assert_same_step(again, model)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1, "as the next process finds it"


def test_how_much_one_kernel_may_hold_is_told_to_inductor(monkeypatch):
    given = []

    class Noted(Inductor):
        def __init__(self, options, *args, **settings):
            given.append(options)
            super().__init__(options, *args, **settings)

    monkeypatch.setattr("kitsune.techniques.compile.Inductor", Noted)
    for config in (None, FusionConfig(max_fusion_size=7, enable_elementwise=False)):
        TECHNIQUES["compile"].apply("default", build_of(model_of(), config))
    assert given == [{}, {"max_fusion_size": 7}]


@pytest.mark.parametrize(("streams", "asked"), [("1", {}), ("4", {"inplace_buffers": False})])
def test_for_several_streams_inductor_gives_each_result_memory_of_its_own(monkeypatch, streams, asked):
    compiled = []

    def noted(graph, inputs, options):
        compiled.append(options)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile", noted)
    build = build_of(model_of())
    for knob, choice in {"compile": "coordinate-descent", "streams": streams}.items():
        TECHNIQUES[knob].apply(choice, build)
    build.forward(ROWS.detach())
    (options,) = compiled
    for name in ("unsafe_marked_cacheable_functions", "post_grad_custom_pre_pass"):
        options.pop(name)
    assert options == {**options_of("coordinate-descent"), **asked}


def test_the_report_tells_what_was_fused(fusing, monkeypatch):
    monkeypatch.setattr(TECHNIQUES["fusion"], "why_not", lambda choice, facts: None)
    model = model_of()
    trained = TrainStep(model, nn.functional.mse_loss, sgd(model.parameters()), plan=Plan.by_hand(fusion="kitsune"))
    assert not trained.report.fusion.matches
    trained(ROWS.detach(), torch.zeros(2, 3, 16))
    assert set(trained.report.fusion.matches) == {"layer_norm", "linear_activation"}
    assert "note      fusion replaced " in str(trained.report)
    assert trained.report.fusion.launches_before is None


def test_a_hook_that_comes_later_is_run(fusing):
    model = model_of()
    build = build_of(model)
    TECHNIQUES["fusion"].apply("kitsune", build)
    build.forward(ROWS)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    build.forward(ROWS)
    assert calls == [1]


def test_a_configuration_by_hand_steers_it(fusing):
    model = model_of()
    build = build_of(model, FusionConfig(enable_reduction=False, min_fusion_benefit=1.5))
    TECHNIQUES["fusion"].apply("kitsune", build)
    build.forward(ROWS)
    assert build.fusion.get_fusion_stats().matches == {"linear_activation": 1}
    assert build.fusion.config.min_fusion_benefit == 1.5


def test_a_failing_rewrite_is_its_fault(fusing, monkeypatch):
    def fails(*_):
        raise AssertionError("a pattern went wrong")

    monkeypatch.setattr("kitsune.fusion.engine.rewrite", fails)
    model = model_of()
    build = build_of(model)
    TECHNIQUES["fusion"].apply("kitsune", build)
    with pytest.raises(BackendCompilerFailed) as caught:
        build.forward(ROWS)
    assert TECHNIQUES["fusion"].blames(caught.value)
    assert not TECHNIQUES["fusion"].blames(RuntimeError("of the user"))
