"""Hugging Face's Llama of the size of GPT-2 small, 8 x 1024 tokens, with labels, as its users would train it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kitsune import Workload

BATCH, SEQ = 8, 1024
CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    max_position_embeddings=SEQ,
    use_cache=False,
)


def make_workload() -> Workload:
    """The loss is the model's own: it is given the labels, and a mask that hides nothing."""
    model = LlamaForCausalLM(CONFIG).train()
    input_ids = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ))
    x = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
    return Workload(model, None, torch.optim.AdamW(model.parameters(), lr=3e-4), (x, None))
