"""A workload and a batch in, one training step as given done to it."""

import torch

from kitsune.workload import Workload, call_model, loss_of


def plain_step(workload: Workload, x: object, y: object, *, update: bool = True) -> torch.Tensor:
    """One training step in plain torch, as given. The detached loss; gradients stay in p.grad."""
    workload.optimizer.zero_grad(set_to_none=True)
    loss = loss_of(call_model(workload.model, x), workload.loss_fn, y)
    loss.backward()
    if update:
        workload.optimizer.step()
    return loss.detach()
