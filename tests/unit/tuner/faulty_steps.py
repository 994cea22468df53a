"""Workloads whose step goes wrong where it runs channels last, and nowhere else: so only a candidate has the fault.

Each function of `FAULTS` is a workload `FILE.py:NAME`; `right` and `right_with_dropout` have none. With `_in_bf16`
after its name, parameters, buffers and images are bf16.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kitsune.workload import Workload
from tuner.zoo.streams import images

RATE = 0.3


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(context, tensor, factor):
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


class Overwritten(torch.autograd.Function):
    """The identity, whose gradient is other values."""

    @staticmethod
    def forward(context, tensor, value):
        context.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return torch.full_like(gradient, context.value), None


class Net(nn.Module):
    """(images [batch, 3, 8, 8], labels [batch]) -> the loss."""

    def __init__(self, fault: str, *, dropout: bool) -> None:
        super().__init__()
        self.fault, self.drops = fault, dropout
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16 * 16, 32), nn.Linear(32, 5)
        self.drop1, self.drop2 = (nn.Dropout(RATE if dropout else 0.0) for _ in range(2))
        self.is_candidate = False
        self.steps = 0

    def has(self, *faults: str) -> bool:
        return self.is_candidate and self.fault in faults

    def forward(self, x, y):
        self.is_candidate = x.is_contiguous(memory_format=torch.channels_last)
        self.steps += self.is_candidate
        x = self.images(x)
        for norm in (self.norm1, self.norm2):
            norm.momentum = 0.09 if self.has("momentum_of_batch_norm") else 0.1
        h = F.relu(self.normed(self.norm1, self.conv1(x)))
        h = F.relu(self.normed(self.norm2, F.conv2d(h, *self.second(), padding=1)))
        h = F.max_pool2d(h, 2)
        if self.has("fresh_masks"):
            logits = checkpoint(self.tail, h, use_reentrant=False, preserve_rng_state=False)
        else:
            logits = self.tail(h)
        return F.cross_entropy(logits.float(), y) * self.factor()

    def images(self, x):
        if not self.has("constant_batch"):
            return x
        self.first = getattr(self, "first", x)
        return self.first

    def normed(self, norm, h):
        if self.has("stale_statistics"):
            return F.batch_norm(h, None, None, norm.weight, norm.bias, training=True)
        return norm(h)

    def second(self):
        weight, bias = self.conv2.weight, self.conv2.bias
        if self.has("gradient_too_large"):
            weight = Scaled.apply(weight, 1.01)
        if self.has("convolution_bias_gradient_of_other_memory"):
            bias = Overwritten.apply(bias, 1e37)  # as large as in pytorch#190796
        if self.has("weight_gradient_zero") and self.steps > 2:
            weight = Scaled.apply(weight, 0.0)
        if self.has("weight_gradient_zero_now_and_then") and self.steps % 6 == 4:
            weight = Scaled.apply(weight, 0.0)
        return weight, bias

    def tail(self, h):
        bias = self.hidden.bias
        if self.has("bias_gradient_zero") and self.steps > 2:
            bias = Scaled.apply(bias, 0.0)
        h = F.relu(F.linear(self.dropped(self.drop1, h.flatten(1)), self.hidden.weight, bias))
        return self.head(self.dropped(self.drop2, h))

    def dropped(self, drop, h):
        if self.has("dropout_off"):
            return h
        if drop is self.drop1:
            if self.has("dropout_off_in_one"):
                return h
            if self.has("dropout_rarer", "dropout_more_often"):
                return F.dropout(h, 0.1 if self.fault == "dropout_rarer" else 0.9, self.training)
        return drop(h)

    def factor(self) -> float:
        if self.has("nan_later") and self.steps > 20:
            return float("nan")
        if self.has("loss_doubled") or (self.has("loss_doubled_later") and self.steps > 6):
            return 2.0
        return 1.0


class Given:
    """The right optimizer until its model is a candidate's."""

    def __init__(self, model, *arguments, **options):
        super().__init__(model.parameters(), *arguments, **options)
        self.model = model
        self.updates = 0
        self.given = {name: self.param_groups[0].get(name) for name in ("lr", "betas", "eps", "weight_decay")}

    def step(self, closure=None):
        fault = self.model.fault if self.model.is_candidate else ""
        self.updates += 1
        if fault in SKIPPED and self.updates % SKIPPED[fault] == 0:
            return
        group, before = self.param_groups[0], self.model.head.bias.detach().clone()
        right = {name: group[name] for name in WRONG.get(fault, ())}
        group.update(WRONG.get(fault, {}))
        if fault == "rate_ignored":
            right, group["lr"] = {"lr": group["lr"]}, self.given["lr"]
        super().step(closure)
        group.update(right)
        if fault == "bias_never_updated":
            with torch.no_grad():
                self.model.head.bias.copy_(before)


class AdamW(Given, torch.optim.AdamW):
    pass


class SGD(Given, torch.optim.SGD):
    pass


SKIPPED = {"update_skipped_every_4th": 4, "update_skipped_every_8th": 8}
WRONG = {
    "weight_decay_dropped": {"weight_decay": 0.0},
    "weight_decay_times_10": {"weight_decay": 0.1},
    "beta2": {"betas": (0.9, 0.99)},
    "beta1": {"betas": (0.8, 0.999)},
    "eps": {"eps": 1e-6},
}
DROPOUT_FAULTS = ("dropout_off", "dropout_off_in_one", "dropout_rarer", "dropout_more_often", "fresh_masks")
FAULTS = (
    "gradient_too_large",
    "convolution_bias_gradient_of_other_memory",
    "bias_gradient_zero",
    "weight_gradient_zero",
    "weight_gradient_zero_now_and_then",
    "bias_never_updated",
    *SKIPPED,
    *WRONG,
    "rate_ignored",
    "momentum_of_batch_norm",
    "loss_doubled",
    "loss_doubled_later",
    "nan_later",
    "constant_batch",
    "stale_statistics",
    *DROPOUT_FAULTS,
)


def workload(fault: str, *, dropout: bool = False, dtype: torch.dtype = torch.float32) -> Workload:
    model = Net(fault, dropout=dropout).to(dtype)
    optimizer = SGD(model, 0.05, momentum=0.9) if fault == "weight_gradient_zero" else AdamW(model, 1e-3)
    labels = torch.randint(5, (32,))
    return Workload(
        model, None, optimizer, ((torch.randn(32, 3, 8, 8).to(dtype), labels), None), partial(batches, dtype=dtype)
    )


def batches(seed, *, dtype):
    return (((x.to(dtype), y), None) for x, y in images(32, 3, 8, 5, seed))


MADE = {fault: partial(workload, fault, dropout=fault in DROPOUT_FAULTS) for fault in FAULTS}
MADE |= {"right": partial(workload, ""), "right_with_dropout": partial(workload, "", dropout=True)}
globals().update(MADE)
globals().update({f"{name}_in_bf16": partial(make, dtype=torch.bfloat16) for name, make in MADE.items()})
