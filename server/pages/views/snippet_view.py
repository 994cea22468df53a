"""Code snippets that train with a plan. Each is a complete program that runs where Kitsune is installed."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from server.pages.views.facts_view import again
from tuner.records import Run
from tuner.store.queries.runs import ARCHIVE, LIVE, ZOO

_WIDTH: Final = 88

_LOADED: Final = """\
workload = load_workload({spec}, device)
model, loss_fn, optimizer, (x, y) = workload.model, workload.loss_fn, workload.optimizer, workload.batch
"""
_STAND_IN: Final = """\
# Replace these four lines with your own model, loss, optimizer and batch.
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
loss_fn = torch.nn.functional.cross_entropy
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
"""
_LOOP: Final = """\
for _ in range(20):  # for x, y in loader:
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()

print(loss.item(), optimizer.report.applied, optimizer.report.declined)
"""
_STEP: Final = """\
step = kitsune.TrainStep(model, loss_fn, optimizer, plan=plan)
for _ in range(20):  # for x, y in loader:
    loss = step(x, y)

print(loss.item(), step.report.applied, step.report.declined)
"""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A program with the label of its tab; `slug`: the label for use in HTML ids."""

    slug: str
    label: str
    language: str
    code: str
    note: str


def snippets(run: Run, plan: Plan, server: str | None) -> tuple[Snippet, ...]:
    """The snippets of a run. `server`: the URL from which the viewer can fetch the plan, or None."""
    return (
        Snippet("step", "TrainStep", "python", _train_step(run, plan), "The whole step by the plan: the fastest way."),
        Snippet("drop-in", "Drop-in", "python", _drop_in(run, plan), "Your loop stays; one line changes."),
        Snippet("by-hand", "Plain loop", "python", _by_hand(run, plan), _by_hand_note(plan)),
        Snippet("commands", "Command line", "bash", _commands(run, server), _commands_note(server)),
    )


def _train_step(run: Run, plan: Plan) -> str:
    return f"{_imports(run)}\n{_workload(run)}\n{_plan(plan)}\n{_STEP}"


def _drop_in(run: Run, plan: Plan) -> str:
    wrapped = "optimizer = kitsune.KitsuneOptimizer(optimizer, plan=plan)\n"
    return f"{_imports(run, *_helpers(run, plan))}\n{_workload(run)}\n{_plan(plan)}\n{wrapped}{_loop(run, plan)}"


def _by_hand(run: Run, plan: Plan) -> str:
    lines = "".join(f"{line}\n" for line in _torch_lines(plan))
    wrapped = lines + _call("optimizer = kitsune.KitsuneOptimizer", ["optimizer", *_options(plan)])
    return f"{_imports(run, *_helpers(run, plan))}\n{_workload(run)}\n{wrapped}{_loop(run, plan)}"


def _loop(run: Run, plan: Plan) -> str:
    loss = "loss_fn(model(x), y)" if _is_plain(run, plan) else "loss_of(call_model(model, x), loss_fn, y)"
    return _LOOP.format(loss=loss)


def _is_plain(run: Run, plan: Plan) -> bool:
    """Whether the model takes one tensor and the loss is a function, as far as the records show."""
    return run.workload in (ARCHIVE, LIVE) or (run.workload.startswith(ZOO) and "," not in plan.batch)


def _helpers(run: Run, plan: Plan) -> tuple[str, ...]:
    return () if _is_plain(run, plan) else ("from kitsune.workload import call_model, loss_of",)


def _imports(run: Run, *more: str) -> str:
    own = () if run.workload in (ARCHIVE, LIVE) else ("from tuner.workloads.loader import load_workload",)
    device = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    return "\n".join(("import torch", "", "import kitsune", *more, *own, "", device))


def _workload(run: Run) -> str:
    return _STAND_IN if run.workload in (ARCHIVE, LIVE) else _LOADED.format(spec=_quoted(run.workload))


def _quoted(text: str) -> str:
    """A Python string literal in ASCII, with double quotes if no escapes are needed."""
    return f'"{text}"' if re.fullmatch(r"[\w:?=&./ -]*", text, re.ASCII) else ascii(text)


def _plan(plan: Plan) -> str:
    knobs = [name for name in KNOBS if name in plan.knobs]
    return _call("plan = kitsune.Plan.by_hand", [f"{name}={_value(plan.knobs[name])}" for name in knobs])


def _call(name: str, arguments: Sequence[str]) -> str:
    """A call on one line if it fits, else with one argument per line."""
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return f"{line}\n"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")\n"


def _value(choice: str | int) -> str:
    return str(choice) if isinstance(choice, int) else _quoted(choice)


def _torch_lines(plan: Plan) -> Iterator[str]:
    """The choices that have no option, as lines of plain torch."""
    if plan.choice("layout") == "channels_last":
        yield "model.to(memory_format=torch.channels_last)"
    if plan.choice("precision") == "tf32":
        yield 'torch.set_float32_matmul_precision("high")'
    if (update := plan.choice("update")) != "given":
        given, other = ("foreach", "fused") if update == "foreach" else ("fused", "foreach")
        yield f"for group in optimizer.param_groups:\n    group.update({given}=True, {other}=False)"


def _options(plan: Plan) -> Iterator[str]:
    """The choices that have options of `KitsuneOptimizer`."""
    if (precision := plan.choice("precision")) in ("bf16", "fp16"):
        dtype = "torch.bfloat16" if precision == "bf16" else "torch.float16"
        yield "enable_amp=True"
        yield f"amp_config=kitsune.AMPConfig(dtype={dtype})"
    if plan.choice("compile") != "off":
        yield "enable_fusion=True"
        if (fusion := plan.choice("fusion")) != "off":
            flags = "enable_elementwise=False, enable_reduction=False" if fusion == "products" else ""
            yield f"fusion_config=kitsune.FusionConfig({flags})"
    yield f"capture_graph={plan.choice('capture') != 'none'}"
    if (streams := plan.choice("streams")) != 1:
        yield f"num_streams={streams}"
        if pool := plan.choice("pool_bytes"):
            yield f"memory_pool_size={pool}"


def _by_hand_note(plan: Plan) -> str:
    lost = [f"attention={plan.choice('attention')}"] if plan.choice("attention") != "default" else []
    if (mode := plan.choice("compile")) not in ("off", "default"):
        lost.append(f"compile={mode}, which becomes the default mode")
    if plan.choice("update") == "kitsune":
        lost.append("update=kitsune, which becomes torch's fused one")
    if plan.choice("compile") == "off" and plan.choice("fusion") != "off":
        lost.append("fusion without torch.compile")
    without = f" Options do not reach {'; nor '.join(lost)}." if lost else ""
    return f"The same without a plan, each option by hand.{without}"


def _commands(run: Run, server: str | None) -> str:
    if server is None:
        return f"{again(run)}\n"
    return (
        f"kitsune runs plan {shlex.quote(run.id)} --server {shlex.quote(server)} --out plan.json\n"
        "kitsune plan show plan.json\n"
        "kitsune plan check plan.json\n"
    )


def _commands_note(server: str | None) -> str:
    if server is None:
        return "Tunes the same here."
    return 'KITSUNE_TOKEN holds your token. Then, in Python: plan = kitsune.Plan.load("plan.json").'
