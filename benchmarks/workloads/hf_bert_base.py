"""Hugging Face's BERT-base for sequence classification, 16 x 128 tokens, as its users would train it."""

import torch
from transformers import BertConfig, BertForSequenceClassification

from kitsune import Workload


class Logits(torch.nn.Module):
    """input_ids int64 [batch, seq] -> logits [batch, labels]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def make_workload() -> Workload:
    model = Logits(BertForSequenceClassification(BertConfig(num_labels=2))).train()
    batch = torch.randint(0, 30000, (16, 128)), torch.randint(0, 2, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, batch)
