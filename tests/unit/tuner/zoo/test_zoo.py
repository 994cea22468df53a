"""The zoo: published sizes, steps that train, and forwards that can be compiled, exported and captured."""

import pytest
import torch
from torch import nn

from kitsune.submission.exporting.export import to_archive
from kitsune.submission.rebuilding.rebuild import rebuild
from kitsune.workload import Workload, batch_tensors, call_model, loss_of
from tuner.zoo import ZOO
from tuner.zoo.attention import SelfAttention
from tuner.zoo.bert import Bert, BertSizes
from tuner.zoo.dlrm import DLRM, TINY, products
from tuner.zoo.gpt import GPT, GPTSizes
from tuner.zoo.llama import Llama, LlamaSizes

PARAMETERS = {
    "mlp": (784 * 512 + 512) + (512 * 256 + 256) + (256 * 10 + 10),
    "lenet5": 61_706,
    "resnet18": 11_173_962,
    "resnet50": 25_557_032,
    "googlenet": 6_624_904,
    "bert_base": 109_483_778,
    "bert_large": 335_143_938,
    "vit_b16": 86_567_656,
    "gpt2_small": 124_439_808,
    "llama_125m": 134_105_856,
    "llama_1b": 1_235_814_400,
    "llama_wide": 1_134_596_096,
    "dlrm": 119_889 * 16 + (7_168 + 131_328 + 16_448 + 1_040) + (188_416 + 131_328 + 257),
}
BATCH_SHAPES = {
    "mlp": ((64, 1, 28, 28), (64,)),
    "lenet5": ((64, 1, 28, 28), (64,)),
    "resnet18": ((128, 3, 32, 32), (128,)),
    "resnet50": ((64, 3, 224, 224), (64,)),
    "googlenet": ((16, 3, 224, 224), (16,)),
    "bert_base": ((16, 128), (16,)),
    "bert_large": ((16, 128), (16,)),
    "vit_b16": ((64, 3, 224, 224), (64,)),
    "gpt2_small": ((8, 512), (8, 512)),
    "llama_125m": ((8, 1024), (8, 1024)),
    "llama_1b": ((2, 2048), (2, 2048)),
    "llama_wide": ((2, 2048), (2, 2048)),
    "dlrm": ((2048, 13), *26 * [(2048,)], (2048,)),
}
LOGIT_SHAPES = {
    "mlp": (64, 10),
    "lenet5": (64, 10),
    "resnet18": (128, 10),
    "resnet50": (64, 1000),
    "googlenet": (16, 1000),
    "bert_base": (16, 2),
    "bert_large": (16, 2),
    "vit_b16": (64, 1000),
    "gpt2_small": (8, 512, 50257),
    "llama_125m": (8, 1024, 32000),
    "llama_1b": (2, 2048, 128256),
    "llama_wide": (2, 2048, 32000),
    "dlrm": (2048,),
}
DEAR = frozenset(("resnet50", "googlenet"))  # 1 to 2 s to trace; resnet18 is of the same kind
TINY_OF = {"bert_large": "bert_base", "llama_1b": "llama_125m", "llama_wide": "llama_125m"}
every_model = pytest.mark.parametrize("name", list(PARAMETERS))
every_tiny = pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in TINY_OF])
#: One of each kind, where others take the time of as many: -m minutes.
few_models = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.minutes] * (name not in ("mlp", "resnet18", "gpt2_small", "dlrm")))
        for name in PARAMETERS
    ],
)


def tiny(name: str, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return ZOO[name].tiny.build()


def output(workload: Workload) -> torch.Tensor:
    return call_model(workload.model, workload.batch[0])


def loss(workload: Workload) -> torch.Tensor:
    return loss_of(output(workload), workload.loss_fn, workload.batch[1])


def step(workload: Workload) -> float:
    workload.optimizer.zero_grad()
    value = loss(workload)
    value.backward()
    workload.optimizer.step()
    return value.item()


def test_the_zoo_holds_these_models() -> None:
    assert set(ZOO) == set(PARAMETERS)
    assert all(name == entry.name for name, entry in ZOO.items())


def test_larger_models_share_the_tiny_form_of_their_kind() -> None:
    assert all(ZOO[name].tiny is ZOO[other].tiny for name, other in TINY_OF.items())


@every_model
def test_base_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = ZOO[name].base.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@few_models
def test_base_step_at_full_size_needs_no_values(name: str) -> None:
    """On the meta device tensors have no values: a host sync or a data-dependent branch would raise."""
    with torch.device("meta"):
        workload = ZOO[name].base.build("meta")
    assert tuple(tensor.shape for tensor in batch_tensors(workload.batch)) == BATCH_SHAPES[name]
    assert output(workload).shape == LOGIT_SHAPES[name]
    loss(workload).backward()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


@every_model
def test_base_learns_at_the_rate_of_its_kind(name: str) -> None:
    expected = 1e-4 if name.startswith(("bert", "vit", "gpt2", "llama")) else 1e-3
    assert ZOO[name].base.learning_rate == expected
    assert ZOO[name].tiny.learning_rate == 1e-3


@every_model
def test_tiny_is_small_and_of_the_same_architecture(name: str) -> None:
    with torch.device("meta"):
        base, small = ZOO[name].base.model(), ZOO[name].tiny.model()
    assert {type(module) for module in small.modules()} == {type(module) for module in base.modules()}
    assert sum(parameter.numel() for parameter in small.parameters()) < 200_000


@every_tiny
def test_tiny_trains_on_a_fixed_batch(name: str) -> None:
    workload = tiny(name)
    assert workload.model.training
    assert isinstance(workload.optimizer, torch.optim.AdamW)
    losses = torch.tensor([step(workload) for _ in range(6)])
    assert torch.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.02


@every_tiny
def test_first_loss_is_that_of_a_uniform_guess(name: str) -> None:
    """A proper start spreads the probability over all classes: cross entropy near log(classes)."""
    workload = tiny(name)
    classes = 2 if name == "dlrm" else output(workload).shape[-1]
    assert loss(workload).item() == pytest.approx(torch.tensor(float(classes)).log().item(), rel=0.35)


@every_tiny
def test_gradients_reach_every_parameter(name: str) -> None:
    workload = tiny(name)
    loss(workload).backward()
    unreached = [
        key
        for key, parameter in workload.model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert unreached == []


@every_tiny
def test_optimizer_updates_every_parameter(name: str) -> None:
    workload = tiny(name)
    before = {key: parameter.detach().clone() for key, parameter in workload.model.named_parameters()}
    step(workload)
    still = [key for key, parameter in workload.model.named_parameters() if torch.equal(parameter, before[key])]
    assert still == []


@every_tiny
def test_seed_decides_weights_and_batch(name: str) -> None:
    first, again, other = tiny(name, 3), tiny(name, 3), tiny(name, 4)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    one, same, another = (batch_tensors(workload.batch) for workload in (first, again, other))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], another[0])
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.minutes] * (name in DEAR)) for name in PARAMETERS]
)
def test_forward_compiles_as_one_graph(name: str) -> None:
    workload = tiny(name)
    workload.model.eval()
    compiled = torch.compile(workload.model, fullgraph=True, backend="eager")
    torch.testing.assert_close(call_model(compiled, workload.batch[0]), output(workload))
    torch._dynamo.reset()


@every_tiny
def test_forward_exports(name: str) -> None:
    workload = tiny(name)
    x, _ = workload.batch
    exported = torch.export.export(workload.model, x if isinstance(x, tuple) else (x,)).module()
    torch.manual_seed(1)
    expected = output(workload)
    torch.manual_seed(1)
    torch.testing.assert_close(call_model(exported, x), expected)


@every_model
def test_recipe_takes_another_batch(name: str) -> None:
    workload = ZOO[name].tiny.resized({"batch": 3}).build()
    assert {tensor.shape[0] for tensor in batch_tensors(workload.batch)} == {3}
    assert torch.isfinite(loss(workload))


@pytest.mark.parametrize("name", ["bert_base", "gpt2_small", "llama_125m"])
def test_recipe_takes_every_length_up_to_the_longest(name: str) -> None:
    for seq in (1, 5, ZOO[name].tiny.data.limits["seq"]):
        workload = ZOO[name].tiny.resized({"seq": seq}).build()
        assert workload.batch[0].shape[1] == seq
        assert torch.isfinite(loss(workload))


@pytest.mark.parametrize(("seq", "length"), [(16, 2048), (2048, 2048), (4096, 4096)])
def test_the_positions_of_a_llama_are_as_many_as_its_sequences_need(seq: int, length: int) -> None:
    recipe = ZOO["llama_125m"].recipe("base").resized({"batch": 1, "seq": seq})
    with torch.device("meta"):
        model = recipe.model()
    assert model.cosines.shape == model.sines.shape == (length, 64)
    assert recipe.data.limits["seq"] == 2**20


def test_gpt_targets_are_the_next_tokens() -> None:
    ids, targets = tiny("gpt2_small").batch
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert ids.dtype == targets.dtype == torch.int64


def test_gpt_head_is_tied_to_the_embedding() -> None:
    model = tiny("gpt2_small").model
    assert isinstance(model, GPT)
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize("name", ["gpt2_small", "llama_125m"])
def test_a_model_of_next_tokens_never_looks_ahead(name: str) -> None:
    model = tiny(name).model.eval()
    ids = torch.arange(1, 11).reshape(1, 10)
    changed = ids.clone()
    changed[0, 6:] = 99
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_attention_computes_what_torch_multihead_attention_computes() -> None:
    """torchvision's ViT is built on it."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 3, batch_first=True)
    ours = SelfAttention(24, 3, dropout=0.0, causal=False)
    with torch.no_grad():
        ours.projection_in.weight.copy_(theirs.in_proj_weight)
        ours.projection_in.bias.copy_(theirs.in_proj_bias.normal_())
        ours.projection_out.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_dlrm_multiplies_every_feature_with_every_other_once() -> None:
    vectors = torch.arange(24, dtype=torch.float32).reshape(2, 4, 3)
    pairs = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    expected = torch.stack([(vectors[:, one] * vectors[:, other]).sum(1) for one, other in pairs], dim=1)
    assert torch.equal(products(vectors), expected)


def test_dlrm_takes_every_id_of_every_table_and_none_beyond() -> None:
    model = DLRM(TINY)
    last = [torch.tensor([rows - 1]) for rows in TINY.rows]
    assert torch.isfinite(model(torch.zeros(1, 13), last))
    with pytest.raises(IndexError):
        model(torch.zeros(1, 13), [ids + 1 for ids in last])


def test_dlrm_rebuilt_from_its_archive_gets_ids_that_its_tables_have() -> None:
    """An archive keeps the range of ids alone; drawn from another table's, they would be out of bounds."""
    rebuilt = rebuild(to_archive(tiny("dlrm")))
    _, categories = rebuilt.batch[0]
    assert all(int(ids.max()) < rows for ids, rows in zip(categories, TINY.rows, strict=True))
    assert step(rebuilt) > step(rebuilt)


@pytest.mark.parametrize("name", ["bert_base", "gpt2_small", "googlenet"])
def test_dropout_differs_from_step_to_step(name: str) -> None:
    workload = tiny(name)
    assert not torch.equal(output(workload), output(workload))
    workload.model.eval()
    torch.testing.assert_close(output(workload), output(workload))


@every_tiny
def test_all_randomness_is_that_of_dropout_modules(name: str) -> None:
    """Measuring silences them by their p, in train mode."""
    workload = tiny(name)
    for module in workload.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(output(workload), output(workload), rtol=0, atol=0)


def copied(ours: nn.Module, theirs: nn.Module, names: dict[str, str], transposed: tuple[str, ...] = ()) -> None:
    """Copies the reference's weights into ours, which must have one for each of them."""
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert set(names) == set(own)
    assert set(names.values()) == set(other)
    with torch.no_grad():
        for name, parameter in own.items():
            value = other[names[name]]
            parameter.copy_(value.T if names[name].endswith(transposed) else value)


def test_bert_computes_what_hugging_face_computes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    theirs = transformers.BertForSequenceClassification(config).eval()
    ours = Bert(BertSizes(vocabulary=90, max_seq=16, width=32, layers=2, heads=4, hidden=48)).eval()
    copied(ours, theirs, bert_names(layers=2))
    ids = torch.arange(1, 34).reshape(3, 11)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits)


def bert_names(layers: int) -> dict[str, str]:
    names = {
        "embeddings.words": "bert.embeddings.word_embeddings",
        "embeddings.positions": "bert.embeddings.position_embeddings",
        "embeddings.segments": "bert.embeddings.token_type_embeddings",
        "embeddings.norm": "bert.embeddings.LayerNorm",
        "pooler.0": "bert.pooler.dense",
        "classifier": "classifier",
    }
    for i in range(layers):
        layer = f"bert.encoder.layer.{i}"
        names |= {
            f"encoder.{i}.0.query": f"{layer}.attention.self.query",
            f"encoder.{i}.0.key": f"{layer}.attention.self.key",
            f"encoder.{i}.0.value": f"{layer}.attention.self.value",
            f"encoder.{i}.0.output": f"{layer}.attention.output.dense",
            f"encoder.{i}.0.norm": f"{layer}.attention.output.LayerNorm",
            f"encoder.{i}.1.layers.0": f"{layer}.intermediate.dense",
            f"encoder.{i}.1.layers.2": f"{layer}.output.dense",
            f"encoder.{i}.1.norm": f"{layer}.output.LayerNorm",
        }
    return with_parts(names)


def test_gpt_computes_what_hugging_face_computes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = GPT(GPTSizes(vocabulary=90, max_seq=16, width=32, layers=2, heads=4)).eval()
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    copied(ours, theirs, gpt_names(layers=2), transposed=conv1d)
    ids = torch.arange(1, 34).reshape(3, 11)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits)


def gpt_names(layers: int) -> dict[str, str]:
    names = {"tokens": "transformer.wte", "positions": "transformer.wpe", f"decoder.{layers}": "transformer.ln_f"}
    for i in range(layers):
        layer = f"transformer.h.{i}"
        names |= {
            f"decoder.{i}.attention.0": f"{layer}.ln_1",
            f"decoder.{i}.attention.1.projection_in": f"{layer}.attn.c_attn",
            f"decoder.{i}.attention.1.projection_out": f"{layer}.attn.c_proj",
            f"decoder.{i}.feed_forward.0": f"{layer}.ln_2",
            f"decoder.{i}.feed_forward.1": f"{layer}.mlp.c_fc",
            f"decoder.{i}.feed_forward.3": f"{layer}.mlp.c_proj",
        }
    return with_parts(names)


def test_llama_computes_what_hugging_face_computes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = Llama(LlamaSizes(vocabulary=90, max_seq=16, width=32, hidden=48, layers=2, heads=4, key_heads=2)).eval()
    copied(ours, theirs, llama_names(layers=2))
    ids = torch.arange(1, 34).reshape(3, 11)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits)


def llama_names(layers: int) -> dict[str, str]:
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(layers):
        own, other = f"layers.{i}", f"model.layers.{i}"
        names |= {f"{own}.attention_norm": f"{other}.input_layernorm"}
        names |= {f"{own}.feed_forward_norm": f"{other}.post_attention_layernorm"}
        names |= {f"{own}.attention.{part}": f"{other}.self_attn.{part[0]}_proj" for part in ("query", "key", "value")}
        names |= {f"{own}.attention.output": f"{other}.self_attn.o_proj"}
        names |= {f"{own}.feed_forward.{part}": f"{other}.mlp.{part}_proj" for part in ("gate", "up", "down")}
    return {f"{own}.weight": f"{other}.weight" for own, other in names.items()}


def test_a_tied_llama_trains_its_head_with_its_embedding() -> None:
    model = Llama(LlamaSizes(vocabulary=90, max_seq=16, width=32, hidden=48, layers=1, heads=4, is_tied=True))
    assert model.head.weight is model.tokens.weight


def with_parts(modules: dict[str, str]) -> dict[str, str]:
    """Names of parameters from names of modules; embeddings have no bias."""
    bare = ("words", "positions", "segments", "tokens")
    names = {f"{own}.weight": f"{other}.weight" for own, other in modules.items()}
    return names | {
        f"{own}.bias": f"{other}.bias" for own, other in modules.items() if own.rpartition(".")[2] not in bare
    }


@every_tiny
def test_the_stream_of_a_seed_is_the_same_each_time_and_fits_the_example(name: str) -> None:
    workload = tiny(name)
    assert callable(workload.batches)
    one, again, other = (next(iter(workload.batches(seed))) for seed in (1, 1, 2))
    shapes = [(tensor.shape, tensor.dtype) for tensor in batch_tensors(workload.batch)]
    assert [(tensor.shape, tensor.dtype) for tensor in batch_tensors(one)] == shapes
    assert all(map(torch.equal, batch_tensors(one), batch_tensors(again)))
    assert not all(map(torch.equal, batch_tensors(one), batch_tensors(other)))


@few_models
def test_tiny_learns_from_its_stream_what_holds_for_another_seed(name: str) -> None:
    workload = tiny(name)
    assert callable(workload.batches)
    held_out = next(iter(workload.batches(-1)))

    def held_out_loss() -> float:
        with torch.no_grad():
            return loss_of(call_model(workload.model, held_out[0]), workload.loss_fn, held_out[1]).item()

    before = held_out_loss()
    for (x, y), _ in zip(workload.batches(0), range(60), strict=False):
        workload.optimizer.zero_grad()
        loss_of(call_model(workload.model, x), workload.loss_fn, y).backward()
        workload.optimizer.step()
    assert held_out_loss() < before - 0.01
