"""The rivals, in plain torch and at their best: what a user would write by hand without Kitsune.

bf16 autocast, fused AdamW, the loss inside the compiled function, channels_last where that is faster.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kitsune.workload import Workload, call_model, loss_of

Step = Callable[[], torch.Tensor]
COMPILED = {"compile": None, "reduce_overhead": "reduce-overhead", "max_autotune": "max-autotune"}


def eager_step(workload: Workload, *, bf16: bool) -> Step:
    """The loop as everybody writes it, with the optimizer as given."""
    x, y = workload.batch

    def step() -> torch.Tensor:
        workload.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            loss = loss_of(call_model(workload.model, x), workload.loss_fn, y)
        loss.backward()
        workload.optimizer.step()
        return loss.detach()

    return step


def at_its_best(workload: Workload, *, channels_last: bool, capturable: bool = False) -> Workload:
    """The same model in the layout of its choice, with a fused AdamW."""
    x, y = workload.batch
    if channels_last:
        workload.model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    rate = workload.optimizer.param_groups[0]["lr"]
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=rate, fused=True, capturable=capturable)
    return Workload(workload.model, workload.loss_fn, optimizer, (x, y))


def compiled_step(workload: Workload, mode: str | None, options: Mapping[str, Any] | None = None) -> Step:
    """torch.compile of model and loss in one function, in a stock mode, or with options of Inductor's."""
    x, y = workload.batch

    def loss_function(x: Any, y: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss_of(call_model(workload.model, x), workload.loss_fn, y)

    compiled = torch.compile(loss_function, mode=mode, options=dict(options) if options else None)

    def step() -> torch.Tensor:
        workload.optimizer.zero_grad(set_to_none=True)
        loss = compiled(x, y)
        loss.backward()
        workload.optimizer.step()
        return loss.detach()

    return step


def compiled_forward(workload: Workload, options: Mapping[str, Any] | None = None) -> Step:
    """The compiled model as one would serve it: eval mode, bf16, no gradients; it returns what the model does.

    Not inference_mode: outside of it nobody may write to its tensors, and a planned graph fills in its first result.
    """
    x, _ = workload.batch
    model = workload.model.eval()

    def forward(x: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return call_model(model, x)

    compiled = torch.compile(forward, options=dict(options) if options else None)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return compiled(x)

    return step


def graphed(step: Step) -> Step:
    """A compiled step captured by hand into one CUDA graph on fixed inputs, as PyTorch's documentation shows it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    replay.__dict__["alive"] = step  # what the graph reads and writes by address
    return replay
