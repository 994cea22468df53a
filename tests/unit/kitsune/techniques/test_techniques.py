"""Techniques, each alone: when they apply, what they change and give back, and whom an error is blamed on."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kitsune.capture.compile_isolation import own_code
from kitsune.device.tf32 import full_precision, tf32_products
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques import TECHNIQUES, Build, Facts, facts_of, inapplicable, observed_facts, tolerance, why_not
from kitsune.workload import Workload
from tests.step_cases import AttentionNet, Convnet, Mlp, OwnSgd, adamw, assert_same, batches, pair, sgd, train_both
from tuner.search.space import Space

CPU = torch.device("cpu")
H200 = Facts(
    device="cuda",
    compute_capability=(9, 0),
    parameter_dtypes=frozenset({torch.float32}),
    convolutions=True,
    wide_activations=True,
    open_masks=True,
    attention=True,
    blocks=12,
    optimizer="AdamW",
    optimizer_options=("foreach", "fused", "capturable"),
)


def changed(**facts):
    return {**{name: getattr(H200, name) for name in Facts.__dataclass_fields__}, **facts}


# When they apply ------------------------------------------------------------------------------------------------------


def test_everything_applies_where_everything_is_there():
    assert inapplicable(H200) == {}


@pytest.mark.parametrize(
    ("facts", "choice", "words"),
    [
        ({"convolutions": False}, "layout=channels_last", "no convolution"),
        ({"parameter_dtypes": frozenset({torch.bfloat16})}, "precision=fp16", "parameters are already bfloat16"),
        ({"device": "cpu"}, "precision=tf32", "NVIDIA"),
        ({"compute_capability": (7, 5)}, "precision=bf16", "needs compute capability 8.0, this GPU has 7.5"),
        ({"compute_capability": (7, 5)}, "precision=tf32", "needs compute capability 8.0"),
        ({"attention": False}, "attention=flash", "does not call scaled_dot_product_attention"),
        ({"device": "cpu"}, "attention=efficient", "CUDA only"),
        ({"compute_capability": (7, 5)}, "attention=cudnn", "8.0"),
        ({"compiler": "no compiler"}, "compile=default", "no compiler"),
        ({"device": "cpu"}, "compile=reduce-overhead", "GPU"),
        ({"optimizer_options": ()}, "update=fused", "AdamW has no fused implementation"),
        ({"optimizer_chosen": "foreach=True"}, "update=fused", "built with foreach=True"),
        ({"parameter_dtypes": frozenset({torch.complex64})}, "update=fused", "floating-point"),
        ({"device": "cpu"}, "capture=step", "CUDA graphs need a GPU"),
        ({"distributed": True}, "capture=segments", "distributed"),
        ({"hook": "a forward hook on fc"}, "capture=step", "a forward hook on fc would not run"),
    ],
)
def test_why_a_choice_does_not_apply(facts, choice, words):
    assert words in inapplicable(Facts(**changed(**facts)))[choice]


def test_a_step_that_waits_for_the_device_may_be_captured_when_it_is_compiled():
    """What is waited for, a mask that is looked at on the host, may be gone then; a trial finds out."""
    reason = "the step as given waits for the device at train.py:7"
    waits = Facts(**changed(host_sync="train.py:7"))
    assert inapplicable(waits) == {f"capture={choice}, compile=off": reason for choice in ("segments", "step")}
    space = Space.of(inapplicable(waits))
    assert reason in space.allows({"capture": "step"})
    assert space.allows({"capture": "step", "compile": "default"}) is None
    assert why_not("capture", "step", waits) is None
    hooked = inapplicable(Facts(**changed(host_sync="train.py:7", hook="a hook")))
    assert set(hooked) == {"capture=segments", "capture=step"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"device": "cpu"}, "Kitsune's kernels need a GPU"),
        ({"compiler": "no Triton"}, "no Triton"),
        ({"update_kernel": "does not know amsgrad"}, "amsgrad"),
        ({"optimizer_chosen": "fused=True"}, "built with fused=True"),
        ({"sparse_gradients": True}, "sparse gradients"),
    ],
)
def test_why_a_choice_of_which_no_search_thinks_does_not_apply(facts, words):
    assert words in (why_not("update", "kitsune", Facts(**changed(**facts))) or "")


@pytest.mark.parametrize("name", KNOBS)
def test_the_default_always_applies(name):
    assert why_not(name, KNOBS[name].default, Facts(device="cpu", attention=False)) is None


def test_facts_of_a_model():
    model = Convnet()
    facts = facts_of(model, adamw(model.parameters()), CPU)
    assert facts.convolutions
    assert facts.parameter_dtypes == {torch.float32}
    assert (facts.attention, facts.hook, facts.distributed, facts.optimizer_chosen) == (None, None, False, None)
    assert set(facts.optimizer_options) == {"foreach", "fused", "capturable"}
    assert facts.update_kernel is None
    assert facts_of(model, OwnSgd(model.parameters(), 1.0), CPU).optimizer_options == ()
    assert "not for OwnSgd" in facts_of(model, OwnSgd(model.parameters(), 1.0), CPU).update_kernel
    chosen = torch.optim.Adam(model.parameters(), foreach=False)
    assert facts_of(model, chosen, CPU).optimizer_chosen == "foreach=False"


@pytest.mark.parametrize(("model", "shape", "attends"), [(AttentionNet, (2, 5, 32), True), (Mlp, (2, 8), False)])
def test_facts_that_only_a_run_shows(model, shape, attends):
    module = model()
    (batch,) = batches(1, *shape)
    facts = observed_facts(Workload(module, nn.functional.mse_loss, adamw(module.parameters()), batch), CPU)
    assert facts.attention is attends
    assert facts.host_sync is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_tolerances_widen_with_the_dtype():
    losses = [tolerance({"precision": choice}).loss for choice in ("fp32", "tf32", "bf16")]
    assert losses == sorted(set(losses))
    assert tolerance({"update": "fused"}) == tolerance({})


# What they change and give back ---------------------------------------------------------------------------------------


@pytest.fixture
def flags():
    """torch's precision flags, put back after the test."""
    backends = torch.backends
    old = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    libraries = backends.cudnn, backends.mkldnn
    places = backends.cuda.matmul, *(getattr(each, name) for each in libraries for name in ("conv", "rnn"))
    new = (backends, *libraries, *places, backends.mkldnn.matmul)
    before = [each.fp32_precision for each in new]
    yield
    torch.set_float32_matmul_precision(old[0])
    backends.cudnn.allow_tf32 = old[1]
    for each, precision in zip(new, before, strict=True):
        each.fp32_precision = precision
    for each, precision in zip(new, before, strict=True):  # those of libraries have set those of places
        each.fp32_precision = precision


def read(getter):
    try:
        return getter()
    except RuntimeError as error:
        return type(error)


def precision_flags():
    backends = torch.backends
    new = [place.fp32_precision for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
    legacy = (torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.allow_tf32)
    return [*new, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision, *map(read, legacy)]


USERS = {
    "as torch comes": lambda: None,
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "allowed": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "no convolutions": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "the new flag": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "the new flag of convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "the new flag of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "the new flag of cuDNN": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("user", USERS)
def test_tf32_leaves_the_users_flags(flags, user):
    USERS[user]()
    before = precision_flags()
    with contextlib.suppress(ValueError), tf32_products():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.allow_tf32
        raise ValueError("the step failed")
    assert precision_flags() == before


@pytest.mark.parametrize("user", USERS)
def test_full_precision_leaves_the_users_flags(flags, user):
    USERS[user]()
    before = precision_flags()
    with contextlib.suppress(ValueError), full_precision():
        assert precision_flags()[:4] == ["ieee"] * 4
        assert not torch.backends.cuda.matmul.allow_tf32
        raise ValueError("the step failed")
    assert precision_flags() == before


def build_of(model, optimizer):
    return Build(model=model, optimizer=optimizer, device=CPU, forward=model, undo=contextlib.ExitStack())


def test_channels_last_keeps_the_state_of_the_optimizer_in_step():
    model = Convnet()
    optimizer = adamw(model.parameters())
    weight = model.convolution.weight
    model(batches(1, 2, 3, 8, 8)[0][0]).sum().backward()
    optimizer.step()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    values, address = weight.detach().clone(), id(weight)
    build = build_of(model, optimizer)
    TECHNIQUES["layout"].apply("channels_last", build)

    def tensors():
        return [model.convolution.weight, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]

    for _ in range(2):
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors())
        assert all(value.is_contiguous() for value in optimizer.state_dict()["state"][0].values())
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
    assert id(model.convolution.weight) == address
    assert torch.equal(weight, values)
    build.undo.close()
    assert all(tensor.is_contiguous() for tensor in [*tensors(), weight.grad])
    optimizer.load_state_dict(checkpoint)
    assert optimizer.state[weight]["exp_avg"].is_contiguous()


def test_what_a_user_laid_out_by_hand_stays_so():
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    strides = model.weight.stride()
    build = build_of(model, sgd(model.parameters()))
    TECHNIQUES["layout"].apply("channels_last", build)
    build.undo.close()
    assert model.weight.stride() == strides


@pytest.mark.parametrize("choice", ["foreach", "fused"])
@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Adagrad]
)
def test_the_implementation_is_switched_and_switched_back(make, choice):
    model = Mlp()
    optimizer = make(model.parameters(), lr=1e-2)
    if why_not("update", choice, facts_of(model, optimizer, CPU)) is not None:
        assert choice not in optimizer.defaults
        return
    plain = copy.deepcopy(optimizer)
    groups = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
    build = build_of(model, optimizer)
    TECHNIQUES["update"].apply(choice, build)
    assert optimizer.param_groups[0][choice] is True
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    build.undo.close()
    assert [{**group, "params": None} for group in optimizer.param_groups] == groups
    optimizer.step()


def test_the_kernel_is_put_into_the_optimizer_and_taken_out():
    model = Mlp()
    optimizer = adamw(model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    build = build_of(model, optimizer)
    TECHNIQUES["update"].apply("kitsune", build)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, False)
    assert "_init_group" in vars(optimizer)
    assert optimizer.state_dict() == before
    build.undo.close()
    assert "_init_group" not in vars(optimizer)
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["fused"] is None


def test_a_loaded_checkpoint_brings_its_own_flags():
    model = Mlp()
    optimizer = adamw(model.parameters())
    build = build_of(model, optimizer)
    TECHNIQUES["update"].apply("fused", build)
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), foreach=True).state_dict())
    assert optimizer.param_groups[0]["fused"] is True
    build.undo.close()
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, True)


def test_sdpa_runs_on_the_chosen_backend_and_the_rest_of_the_program_as_before():
    build = build_of(AttentionNet(), sgd(Mlp().parameters()))
    TECHNIQUES["attention"].apply("math", build)
    (context,) = build.forward_contexts
    assert torch.backends.cuda.flash_sdp_enabled()
    with context():
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


# Compiling ------------------------------------------------------------------------------------------------------------


def test_each_plan_compiles_its_own_code():
    """More plans in one process than torch.compile keeps variants of one function (`recompile_limit`, 8)."""
    compiled, kept = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for width in range(1, 12):
        layer = nn.Linear(width, 1)
        kept.append(torch.compile(own_code(lambda x, layer=layer: layer(x).sum()), backend=backend, dynamic=False))
        kept[-1](torch.ones(2, width))
    assert len(compiled) == 11


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_a_compiled_step_trains_as_the_plain_loop_and_sees_hooks_that_come_later(own_cache):
    calls: list[int] = []
    planned, plain = pair(CPU, {"compile": "default"}, model=lambda: Mlp(dropout=0.0), optimizer=sgd)
    many = batches(5)
    train_both(planned, plain, many)
    assert_same(planned, plain, rtol=1e-4, atol=1e-5)
    assert not planned.step.report.declined
    assert counters["stats"]["unique_graphs"] == 1
    planned.model.first.register_forward_hook(lambda *_: calls.append(1))
    train_both(planned, plain, many)
    assert len(calls) == 5
    assert_same(planned, plain, rtol=1e-4, atol=1e-5)


def attention_kernels(choice):
    """The names of the attention kernels that a compiled step of this choice launches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AttentionNet()
    plan = Plan.by_hand(compile="default", attention=choice)
    step = TrainStep(model, nn.functional.mse_loss, sgd(model.parameters()), plan=plan)
    (batch,) = batches(1, 2, 16, 32)
    step(*batch)
    with torch.profiler.profile() as profile:
        step(*batch)
    assert not step.report.declined
    return {event.name for event in profile.events() if "scaled_dot_product" in event.name}


@pytest.mark.minutes
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
def test_one_plan_does_not_get_the_code_of_another_from_the_cache(own_cache):
    """torch's cache on disk does not see the attention backend: math would be served where flash was chosen."""
    assert not attention_kernels("math")
    assert any("flash_attention" in name for name in attention_kernels("flash"))


@pytest.mark.parametrize("kind", [AssertionError, IndexError])
@pytest.mark.parametrize(("file", "is_blamed"), [("torch/_dynamo/convert_frame.py", True), ("me/model.py", False)])
def test_what_dynamo_raises_again_as_it_was_is_the_fault_of_compile(kind, file, is_blamed):
    scope = {}
    exec(compile(f"def fails():\n    raise {kind.__name__}('inside')", file, "exec"), scope)
    with pytest.raises(kind) as raised:
        scope["fails"]()
    assert TECHNIQUES["compile"].blames(raised.value) is is_blamed
