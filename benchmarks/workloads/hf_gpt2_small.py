"""Hugging Face's GPT-2 small, 8 x 512 tokens, with labels, as its users would train it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kitsune import Workload

BATCH, SEQ = 8, 512
CONFIG = GPT2Config(n_positions=SEQ, use_cache=False)


def make_workload() -> Workload:
    """The loss is the model's own: it is given the labels. Dropout is on, as in its configuration."""
    model = GPT2LMHeadModel(CONFIG).train()
    input_ids = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ))
    return Workload(
        model,
        None,
        torch.optim.AdamW(model.parameters(), lr=3e-4),
        ({"input_ids": input_ids, "labels": input_ids.clone()}, None),
    )
