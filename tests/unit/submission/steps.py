"""Training steps by name, small enough to export in about a second each."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
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
from tests.unit.submission import layers


def _images(size: int, channels: int = 3, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def _labels(batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 5, (batch,))


def _ids(batch: int = 4, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 50, (batch, length))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _next_token(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def mlp(batch: int = 4, width: int = 16, p: float = 0.1) -> Workload:
    model = layers.MLP(width, p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(
        model, nn.CrossEntropyLoss(weight=torch.rand(5)), optimizer, (torch.randn(batch, 12), _labels(batch))
    )


def lenet(batch: int = 4) -> Workload:
    model = layers.LeNet()
    return Workload(model, F.cross_entropy, _adamw(model), (_images(28, 1, batch), _labels(batch)))


def resnet(batch: int = 4) -> Workload:
    model = layers.ResNet()
    return Workload(model, F.cross_entropy, _adamw(model), (_images(16, 3, batch), _labels(batch)))


def resnet_channels_last() -> Workload:
    model = layers.ResNet().to(memory_format=torch.channels_last)
    x = _images(16).contiguous(memory_format=torch.channels_last)
    return Workload(model, F.cross_entropy, _adamw(model), (x, _labels()))


def inception() -> Workload:
    model = layers.Inception()

    def loss(out, y):
        return F.cross_entropy(out["logits"], y) + 0.3 * F.cross_entropy(out["aux"], y)

    return Workload(model, loss, _adamw(model), (_images(12), _labels()))


def bert(batch: int = 4) -> Workload:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=5,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config).train()
    mask = torch.ones(batch, 12, dtype=torch.long)
    mask[1:, 9:] = 0
    x = {"input_ids": _ids(batch), "attention_mask": mask}
    return Workload(model, lambda out, y: F.cross_entropy(out.logits, y), _adamw(model), (x, _labels(batch)))


def gpt2() -> Workload:
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    ids = _ids()
    return Workload(model, lambda out, y: _next_token(out.logits, y), _adamw(model), (ids, ids))


def llama_hf() -> Workload:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = _ids()
    return Workload(model, None, _adamw(model), ({"input_ids": ids, "labels": ids}, None))


def t5() -> Workload:
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    labels = _ids(length=7)
    labels[:, -2:] = -100
    return Workload(model, None, _adamw(model), ({"input_ids": _ids(), "labels": labels}, None))


def llama(batch: int = 4) -> Workload:
    model = layers.Llama()
    ids = _ids(batch)
    return Workload(model, _next_token, _adamw(model), (ids, ids))


def vit() -> Workload:
    model = layers.ViT()
    return Workload(model, F.cross_entropy, _adamw(model), (_images(16), _labels()))


def lstm() -> Workload:
    model = layers.LSTM()
    return Workload(model, F.cross_entropy, torch.optim.RMSprop(model.parameters()), (_ids(), _labels()))


def encoder() -> Workload:
    model = layers.Encoder()
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[2:, 4:] = True
    return Workload(model, F.cross_entropy, _adamw(model), ((torch.randn(4, 6, 16), padding), _labels()))


def graph() -> Workload:
    model = layers.GraphNetwork()
    edges = torch.randint(0, 10, (2, 30))
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
    return Workload(model, F.cross_entropy, _adamw(model), ((torch.randn(10, 8), edges, groups), _labels()))


def towers() -> Workload:
    model = layers.TwoTowers()
    x = {"features": {"left": torch.randn(4, 6), "right": [torch.randn(4, 4)]}, "scale": torch.rand(4, 1), "flip": True}
    y = {"target": torch.randn(4, 8), "weight": torch.rand(4)}

    def loss(out, y):
        return ((out - y["target"]).pow(2).sum(1) * y["weight"]).sum() / out.shape[0]

    decay = {"params": [model.left.weight, model.right.weight], "weight_decay": 0.1}
    rest = {"params": [model.left.bias, model.right.bias, model.scale], "weight_decay": 0.0}
    return Workload(model, loss, torch.optim.Adam([decay, rest], lr=1e-3, amsgrad=True), (x, y))


def mixed() -> Workload:
    model = layers.Mixed()

    def loss(out, y):
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return F.mse_loss(out, y) + 1e-3 * penalty

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Workload(model, loss, torch.optim.Adagrad(trained), (torch.randn(4, 8), torch.randn(4, 8)))


def own_loss() -> Workload:
    model = layers.OwnLoss()
    return Workload(model, None, torch.optim.NAdam(model.parameters()), ((torch.randn(4, 12), _labels()), None))


def frozen_norms() -> Workload:
    model = layers.ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Workload(model, F.cross_entropy, torch.optim.SGD(trained), (_images(16), _labels()))


def fixed_batch() -> Workload:
    model = layers.FixedBatch()
    return Workload(model, F.cross_entropy, torch.optim.SGD(model.parameters()), (torch.randn(8, 12), _labels(8)))


def double() -> Workload:
    model = layers.MLP().double()
    loss = nn.CrossEntropyLoss()
    return Workload(model, loss, _adamw(model), (torch.randn(4, 12, dtype=torch.float64), _labels()))


STEPS: dict[str, Callable[[], Workload]] = {
    step.__name__: step
    for step in (
        mlp, lenet, resnet, resnet_channels_last, inception, bert, gpt2, llama_hf, t5, llama, vit, lstm, encoder, graph,
        towers, mixed, own_loss, frozen_norms, fixed_batch, double,
    )
}  # fmt: skip
FIXED = frozenset(("fixed_batch",))
"""Those whose batch size cannot vary."""
TRACED_OTHERWISE = frozenset(("llama_hf",))
"""transformers builds an explicit causal mask while it is traced, and passes is_causal otherwise."""


def make(name: str, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return STEPS[name]()
