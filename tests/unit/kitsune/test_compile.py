"""What is compiled for one plan is found by the same plan only: forward and backward, in torch's caches on disk."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kitsune.techniques.compile import Inductor

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


def gradients(tag="", *, backwards=1, may_run_twice=False, is_compiled=True):
    """As another process would come to them, with nothing left of earlier ones but what is on disk."""
    torch.compiler.reset()
    counters.clear()
    model = Waves()
    backend = Inductor({}, tag, {}, may_run_twice=may_run_twice)
    run = torch.compile(model, backend=backend) if is_compiled else model
    loss = run(torch.linspace(-1, 1, 32).view(4, 8)).square().sum()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [parameter.grad for parameter in model.parameters()]


def compiled():
    """How many graphs were: a forward and a backward are two."""
    return counters["inductor"]["fxgraph_cache_miss"]


def test_another_tag_is_compiled_anew_forward_and_backward():
    found = {}
    for tag in ("", " attention=flash", " attention=math", " attention=flash"):
        gradients(tag)
        found.setdefault(tag, []).append(compiled())
    assert found == {"": [2], " attention=flash": [2, 0], " attention=math": [2]}


def test_a_loop_with_a_second_backward_is_not_given_the_code_of_a_step():
    """Both backwards are the same graph, and that of a step writes over what it was given."""
    gradients()
    expected = gradients(backwards=2, is_compiled=False)
    for _ in range(2):
        for one, other in zip(gradients(backwards=2, may_run_twice=True), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert compiled() == 0


def test_what_a_user_lets_torch_cache_is_so_in_a_plan_too(monkeypatch):
    given = []
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _, options: given.append(options) or graph.forward)
    theirs = {"their.function": "1"}
    with torch._inductor.config.patch(unsafe_marked_cacheable_functions=theirs):
        gradients(" precision=bf16")
        gradients()
    marked, plain = given
    assert theirs.items() < marked["unsafe_marked_cacheable_functions"].items()
    assert plain == {}, "as torch.compile keys it"
