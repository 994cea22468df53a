"""What is compiled for one plan is found by the same plan only: forward and backward, in torch's caches on disk."""

import contextlib
import copy
import functools
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.capture.compile_isolation import leave_out_repeated_logs
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques.compile import Inductor
from tests.step_cases import sgd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch's compiler


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Waves(nn.Module):
    """Its backward may use what was saved for it as its own memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        first, last = self.layers
        return last(first(x).tanh().sin().exp().sigmoid()).tanh().sin().exp()


def gradients(*, backwards=1, may_run_twice=False, is_compiled=True):
    """As another process would come to them, with nothing left of earlier ones but what is on disk."""
    torch.compiler.reset()
    counters.clear()
    model = Waves()
    backend = Inductor({}, {}, may_run_twice=may_run_twice)
    run = torch.compile(model, backend=backend) if is_compiled else model
    loss = run(torch.linspace(-1, 1, 32).view(4, 8)).square().sum()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [parameter.grad for parameter in model.parameters()]


def compiled():
    """How many graphs were: a forward and a backward are two."""
    return counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.minutes
def test_by_another_attention_backend_it_is_compiled_anew_forward_and_backward():
    found = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            gradients()
        found.append(compiled())
    assert found == [2, 2, 0]


@pytest.mark.minutes
def test_a_loop_with_a_second_backward_is_not_given_the_code_of_a_step():
    """Both backwards are the same graph, and that of a step writes over what it was given."""
    gradients()
    expected = gradients(backwards=2, is_compiled=False)
    for _ in range(2):
        for one, other in zip(gradients(backwards=2, may_run_twice=True), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert compiled() == 0


class Keeping(nn.Module):
    """A loss that keeps what it was given, now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps, self.logits = False, None

    def forward(self, logits, target):
        if self.keeps:
            self.logits = logits.detach()
        return F.cross_entropy(logits, target)


def test_what_a_loss_keeps_is_not_written_over_by_the_backward_of_one_that_keeps_nothing():
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(8, 4), Keeping()
    batch = torch.randn(16, 8), torch.randint(4, (16,))
    with TrainStep(model, loss_fn, sgd(model.parameters()), plan=Plan.by_hand(compile="default")) as step:
        for loss_fn.keeps in (False, True):
            logits = model(batch[0]).detach()
            step(*batch)
        torch.testing.assert_close(loss_fn.logits, logits)


class Casting(nn.Module):
    """As models of Hugging Face do, it has an autocast of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dtype = nn.Linear(8, 8), dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.layer(x).float()


def test_a_forward_with_an_autocast_of_its_own_is_found():
    x, found = torch.linspace(-1, 1, 32).view(4, 8), []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        torch.compiler.reset()
        counters.clear()
        model = Casting(dtype)
        run = torch.compile(model, backend=Inductor({}, {}, may_run_twice=False))
        result = run(x)
        result.sum().backward()
        torch.testing.assert_close(result, model(x), rtol=1e-2, atol=1e-2)
        found.append((counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]))
    assert found == [(0, 1), (1, 0), (0, 1)]


LOGGER = logging.getLogger(__name__)


def warned(logger, message):
    logger.warning(message)


warned.__module__ = "transformers.utils.logging"


class Logging(nn.Module):
    """As the models of Hugging Face, it logs some messages once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        LOGGER.warning_once("the first layer is behind")
        return self.last(x)


def test_a_message_that_is_logged_once_does_not_break_the_graph(monkeypatch, caplog):
    """Nor does torch log an error, as 2.11 does when it cannot write its settings as JSON."""
    for name in ("warning_once", "info_once"):
        monkeypatch.setattr(logging.Logger, name, functools.lru_cache(warned), raising=False)
    with config.patch(ignore_logger_methods=set()):
        counters.clear()
        batch, model = (torch.randn(16, 8), torch.randint(4, (16,))), Logging()
        with torch.no_grad():
            torch.compile(model, backend="eager")(batch[0])
        assert counters["stats"]["unique_graphs"] == 2
        counters.clear()
        caplog.clear()
        with TrainStep(model, F.cross_entropy, sgd(model.parameters()), plan=Plan.by_hand(compile="default")) as step:
            step(*batch)
        assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_a_user_leaves_out_of_the_graph_stays_left_out_and_ours_is_taken_back(monkeypatch):
    once = functools.lru_cache(warned)
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    monkeypatch.setattr(logging.Logger, "seen_once", set(), raising=False)
    monkeypatch.setattr(logging.Logger, "first_once", lambda self, message: message, raising=False)
    users = {logging.Logger.info}
    with config.patch(ignore_logger_methods=users):
        one, other = contextlib.ExitStack(), contextlib.ExitStack()
        for undo in (one, other):
            leave_out_repeated_logs(undo)
            assert once in config.ignore_logger_methods and logging.Logger.info in config.ignore_logger_methods
            assert logging.Logger.first_once not in config.ignore_logger_methods
            assert list(config.ignore_logger_methods) == list(copy.deepcopy(config.ignore_logger_methods)) == [*users]
        one.close()
        assert once in config.ignore_logger_methods
        del undo, other  # nobody closes it
        gc.collect()
        assert config.ignore_logger_methods == users and type(config.ignore_logger_methods) is set
