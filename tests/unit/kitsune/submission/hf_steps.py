"""Training steps of transformers in tiny sizes."""

import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kitsune.workload import Workload
from tests.unit.kitsune.submission.steps import STEPS, adamw, next_token, some_ids, some_labels


def bert(batch: int = 4) -> Workload:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=5,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config).train()
    mask = torch.ones(batch, 12, dtype=torch.long)
    mask[1:, 9:] = 0
    x = {"input_ids": some_ids(batch), "attention_mask": mask}
    return Workload(model, lambda out, y: F.cross_entropy(out.logits, y), adamw(model), (x, some_labels(batch)))


def gpt2() -> Workload:
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    ids = some_ids()
    return Workload(model, lambda out, y: next_token(out.logits, y), adamw(model), (ids, ids))


def llama_hf() -> Workload:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = some_ids()
    return Workload(model, None, adamw(model), ({"input_ids": ids, "labels": ids}, None))


def t5() -> Workload:
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    labels = some_ids(length=7)
    labels[:, -2:] = -100
    return Workload(model, None, adamw(model), ({"input_ids": some_ids(), "labels": labels}, None))


HF_STEPS = {step.__name__: step for step in (bert, gpt2, llama_hf, t5)}
TRACED_OTHERWISE = frozenset(("llama_hf",))
"""transformers builds an explicit causal mask while it is traced, and passes is_causal otherwise."""
STEPS.update(HF_STEPS)
