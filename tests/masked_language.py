"""A small language model with an attention mask, batches with and without padding, and its training in eager."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.step_cases import sgd

ROWS, TOKENS, WIDTH, WORDS = 2, 8, 16, 11


class Language(nn.Module):
    """Its mask is built and its loss computed as in models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embedding(input_ids).view(ROWS, TOKENS, 2, WIDTH // 2).transpose(1, 2)
        places = torch.arange(TOKENS, device=x.device)
        is_before = places[None, None, None, :] <= places[None, None, :, None]
        mask = is_before & attention_mask.bool()[:, None, None, :]
        mixed = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        logits = self.head(mixed.transpose(1, 2).reshape(ROWS, TOKENS, WIDTH))
        return {"loss": F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), "logits": logits}


def batch_of(padded: int) -> dict[str, torch.Tensor]:
    """The last positions of the first row are padded: their queries still have keys before them."""
    generator = torch.Generator().manual_seed(padded)
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, TOKENS - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1)}


def losses_of_a_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]
) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def plain_losses(batches: list[dict[str, torch.Tensor]], device: str = "cpu") -> list[torch.Tensor]:
    model = Language().to(device)
    return losses_of_a_loop(model, sgd(model.parameters()), batches)
