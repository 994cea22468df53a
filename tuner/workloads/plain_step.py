"""One training step as given, in plain torch."""

import torch

from kitsune.workload import Workload, call_model, loss_of


def plain_step(workload: Workload, x: object, y: object, *, update: bool = True) -> torch.Tensor:
    """Runs one training step as given and returns the detached loss. Gradients stay in `p.grad`."""
    workload.optimizer.zero_grad(set_to_none=True)
    loss = loss_of(call_model(workload.model, x), workload.loss_fn, y)
    loss.backward()
    if update:
        workload.optimizer.step()
    return loss.detach()
