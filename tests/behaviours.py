"""Workloads that behave, and workloads that do not: what tests of measuring copy into a folder of theirs."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from kitsune import Workload


def workload(model, x=None):
    x = torch.randn(16, 8) if x is None else x
    return Workload(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), (x, torch.randn(len(x), 4)))


class Model(nn.Module):
    def __init__(self, behave=lambda h: h):
        super().__init__()
        self.first, self.last, self.behave = nn.Linear(8, 16), nn.Linear(16, 4), behave

    def forward(self, x):
        return self.last(self.behave(F.relu(self.first(x))))


def raises():
    def behave(h):
        raise ValueError("no such luck")

    return workload(Model(behave))


def hangs():
    Path(__file__ + ".pid").write_text(str(os.getpid()))
    return workload(Model(lambda h: time.sleep(600)))


def leaves():
    return workload(Model(lambda h: os._exit(0)))


def breaks_down():
    return workload(Model(lambda h: os.kill(os.getpid(), signal.SIGSEGV)))


def eats_memory():
    return workload(Model(lambda h: h + torch.empty(2**46).sum()))


def is_nan():
    return workload(Model(lambda h: h / 0.0 * 0.0))


def chatters():
    print("hello" * 10_000)
    os.write(1, b'{"phase": "timing"}\n')
    return workload(Model(lambda h: print("step") or h))


def lies():
    os.write(int(sys.argv[1]), b"the answer is 42\n")
    return workload(Model())


def embeds_sparsely():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.embedding(x))

    model = Words()
    batch = torch.randint(50, (16,)), torch.randn(16, 4)
    return Workload(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def trains_by_closures():
    model = Model()
    return Workload(model, F.mse_loss, torch.optim.LBFGS(model.parameters()), (torch.randn(16, 8), torch.randn(16, 4)))


def branches():
    return workload(Model(lambda h: h if h.sum() > 0 else -h))


def under_autocast(change):
    return lambda h: change(h) if torch.is_autocast_enabled("cpu") else h


def wrong_under_autocast():
    return workload(Model(under_autocast(lambda h: 4 * h)))


def nan_under_autocast():
    return workload(Model(under_autocast(lambda h: h * float("inf"))))


def wrong_under_channels_last():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x):
            h = self.conv(x).mean(dim=(2, 3))
            return self.head(h * 1.02 if x.is_contiguous(memory_format=torch.channels_last) else h)

    return workload(Images(), torch.randn(16, 3, 8, 8))


def with_dropout():
    return workload(Model(nn.Dropout(0.3)))


def frozen(h):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return F.dropout(h, 0.3)


def freezes_dropout_under_autocast():
    return workload(Model(lambda h: frozen(h) if torch.is_autocast_enabled("cpu") else F.dropout(h, 0.3)))


def noisy():
    return workload(Model(lambda h: h * (1 + 0.1 * torch.randn_like(h))))


def noisy_and_wrong_under_autocast():
    def behave(h):
        return h * ((3 if torch.is_autocast_enabled("cpu") else 0) + 1 + 0.1 * torch.randn_like(h))

    return workload(Model(behave))
