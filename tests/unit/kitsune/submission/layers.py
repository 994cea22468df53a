"""Small models in plain torch: each has one thing that is hard to carry."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, 5)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.third(self.drop(F.relu(self.second(self.drop(F.relu(self.first(x)))))))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.f1, self.f2, self.f3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c2(F.max_pool2d(F.relu(self.c1(x)), 2))), 2).flatten(1)
        return self.f3(F.relu(self.f2(F.relu(self.f1(x)))))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(self.drop(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1)))


def _unit(inner: int, outer: int, size: int) -> nn.Module:
    conv = nn.Conv2d(inner, outer, size, 1, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU())


class Inception(nn.Module):
    """GoogLeNet: branches side by side, and an auxiliary head in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 8, 3)
        self.branches = nn.ModuleList(
            [
                _unit(8, 4, 1),
                nn.Sequential(_unit(8, 4, 1), _unit(4, 8, 3)),
                nn.Sequential(_unit(8, 4, 1), _unit(4, 4, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _unit(8, 4, 1)),
            ]
        )
        self.fc, self.side = nn.Linear(20, 5), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        joined = torch.cat([branch(x) for branch in self.branches], 1)
        return {"logits": self.fc(joined.mean((2, 3))), "aux": self.side(x.mean((2, 3)))}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Llama(nn.Module):
    """Rotary positions computed without gradients, grouped queries, RMS norms, a gated feed-forward."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.embed = nn.Embedding(50, width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 48, bias=False), nn.Linear(width, 48, bias=False)
        self.down, self.head = nn.Linear(48, width, bias=False), nn.Linear(width, 50, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        frequencies = 1.0 / 10000 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @torch.no_grad()
    def angles(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = torch.outer(positions.float(), self.frequencies)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate(self, x, cos, sin):
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def forward(self, ids):
        x = self.embed(ids)
        batch, length, width = x.shape
        cos, sin = self.angles(x)
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.groups, self.size).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 24)), nn.Parameter(torch.randn(1, 17, 24) * 0.02)
        layer = nn.TransformerEncoderLayer(24, 3, 48, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        return self.head(self.norm(self.encoder(x)[:, 0]))


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask, checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x, padding):
        x = checkpoint(lambda h: self.encoder(h, src_key_padding_mask=padding), x, use_reentrant=False)
        return self.head(x.mean(1))


class Causal(nn.Module):
    """nn.TransformerEncoder with a mask whose values it asks: once causal, once not; the first part checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x, mask):
        x = checkpoint(lambda h: self.encoder(h, mask=mask), x, use_reentrant=False)
        x = self.encoder(x, mask=torch.zeros_like(mask))
        return self.head(self.encoder(x, mask=mask).mean(1))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.head = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True), nn.Linear(16, 5)

    def forward(self, source, target, source_mask, target_mask):
        h = self.transformer(source, target, src_mask=source_mask, tgt_mask=target_mask)
        return self.head(h.mean(1))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, ids):
        out, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(out[:, -1] + torch.cat((hidden[-2], hidden[-1]), -1))


class GraphNetwork(nn.Module):
    """Messages along edges: gather, index_add, scatter_reduce; then a mean per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, nodes, edges, graph):
        source, target = edges
        h = torch.relu(self.message(torch.cat((nodes[source], nodes.index_select(0, target)), -1)))
        summed = torch.zeros_like(nodes).index_add(0, target, h)
        degree = torch.zeros(nodes.shape[0], device=nodes.device).scatter_add_(0, target, torch.ones_like(h[:, 0]))
        largest = torch.zeros_like(nodes).scatter_reduce(0, target[:, None].expand_as(h), h, "amax")
        nodes = self.update(torch.cat((summed / degree.clamp(min=1)[:, None], largest), -1))
        pooled = torch.zeros(4, 8, device=nodes.device).index_add_(0, graph, nodes)
        return self.head(pooled)


class TwoTowers(nn.Module):
    """Several inputs, one of them optional and given as a keyword, nested in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, features, *, scale=None, flip=False):
        one, two = self.left(features["left"]), self.right(features["right"][0])
        h = one - two if flip else one * two
        return h * (self.scale if scale is None else scale)


class Mixed(nn.Module):
    """Frozen layers, tied weights, autocast and no_grad regions, a constant made in the forward, an in-place buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.second.requires_grad_(False)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("large", torch.randn(200, 100))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = torch.relu(self.first(x))
        with torch.no_grad():
            self.running.mul_(0.9).add_(h.mean(0), alpha=0.1)
            offset = self.running * torch.tensor(0.5)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.second(h) + 1
            with torch.autocast(x.device.type, enabled=False):
                h = h.float() + self.large.sum() * 1e-4
        h = self.tied(h - offset)
        return h + torch.rand_like(h) * torch.arange(x.shape[0], device=x.device)[:, None]


class OwnLoss(nn.Module):
    """Returns its loss, in a dict beside other things, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class FixedBatch(nn.Module):
    """Works for one batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        return (x * self.weight).view(8, 12)[:, :5]
