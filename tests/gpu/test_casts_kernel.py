"""Casts as Triton compiles them: bits against torch, few launches, streams, CUDA graphs, the copies of weights."""

import pytest
import torch

from kitsune.autograd.half_weights import HalfWeights
from kitsune.kernels import casts as kernel
from kitsune.kernels.casts import cast_all
from kitsune.launches.execution.kernel_trace import kernels_of
from tests.kernel_checks import check_current_stream, check_graph

LAYER = [(768, 768), (768,)] * 4 + [(3072, 768), (3072,), (768, 3072), (768,)]
#: They end amid a block and amid 16 bytes.
MIXED = [(5, 3), (), (4099,), (0,), (8192,), (1,), (17,), (64, 3, 7, 7), (512, 512, 3, 3), (1000, 2048), (1000,)]
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
]


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is cast is cast by the kernel."""
    monkeypatch.setattr(kernel, "reference", None)


def drawn(device, shapes=MIXED, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in tensors]


def cast_to(dtype, sources):
    targets = [torch.full_like(source, 7, dtype=dtype) for source in sources]
    cast_all(targets, sources)
    return targets


def assert_same_bits(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        wanted = torch.empty_like(target).copy_(source)
        bits = torch.int32 if target.dtype == torch.float32 else torch.int16
        assert target.stride() == source.stride()
        assert ((target.view(bits) == wanted.view(bits)) | (target.isnan() & wanted.isnan())).all()


@pytest.mark.parametrize("shapes", [LAYER * 4, MIXED], ids=["layers", "mixed"])
@pytest.mark.parametrize(("given", "wanted"), DTYPES)
def test_the_bits_are_those_of_torch(device, given, wanted, shapes):
    sources = drawn(device, shapes, given)
    assert_same_bits(cast_to(wanted, sources), sources)


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16])
def test_every_kind_of_fp32_is_rounded_as_torch_rounds_it(device, wanted):
    """Random bits: subnormal and not finite numbers among them; and all ties of bf16 and fp16 near 1."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), device=device).int()
    ties = 1 + torch.arange(2**13, device=device) * 2.0**-13
    sources = [bits.view(torch.float32), ties, -ties]
    assert_same_bits(cast_to(wanted, sources), sources)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
def test_every_number_in_half_precision_is_widened_as_torch_widens_it(device, given):
    sources = [torch.arange(-(2**15), 2**15, device=device).short().view(given)]
    assert_same_bits(cast_to(torch.float32, sources), sources)


@pytest.mark.parametrize("shifts", [(1, 0), (0, 1), (3, 5)])
def test_tensors_may_lie_at_odd_addresses(device, shifts):
    rooms = torch.randn(9000, device=device), torch.full((9000,), 5.0, device=device, dtype=torch.bfloat16)
    source, target = (room[shift:][:8193] for room, shift in zip(rooms, shifts, strict=True))
    others = drawn(device)
    targets = [target, *(torch.zeros_like(one, dtype=torch.bfloat16) for one in others)]
    cast_all(targets, [source, *others])
    assert_same_bits(targets, [source, *others])
    assert (rooms[1][: shifts[1]] == 5).all() and (rooms[1][shifts[1] + 8193 :] == 5).all()


def test_there_may_be_more_elements_than_an_int32_counts(device):
    (small,) = drawn(device, [(4099,)])
    source = torch.zeros(2**31 + 4099, device=device)
    source[-4099:] = small
    (target,) = cast_to(torch.bfloat16, [source])
    assert_same_bits([target[-4099:]], [small])
    assert not target[:-4099].any()


def test_it_runs_on_the_stream_that_is_current(device):
    check_current_stream(lambda *sources: cast_to(torch.bfloat16, sources), drawn(device))


@pytest.mark.parametrize(("given", "wanted"), DTYPES[:2])
def test_a_cuda_graph_follows_its_sources(device, given, wanted):
    first, second = (drawn(device, dtype=given, seed=seed) for seed in range(2))
    check_graph(lambda *sources: cast_to(wanted, sources), first, second)


def test_for_tensors_of_other_sizes_no_kernel_is_compiled(device):
    """That would fail during a capture."""
    cast_to(torch.bfloat16, drawn(device, [(3,), (16,)]))
    compiled = compiled_kernels()
    for shapes in ([(1,)], [(16,), (1,), (4096,)], LAYER * 4, [(size,) for size in range(1, 70)]):
        cast_to(torch.bfloat16, drawn(device, shapes))
    assert compiled_kernels() == compiled


def compiled_kernels():
    return sum(len(caches[0]) for caches in kernel.cast_kernel.device_caches.values())


def test_copies_of_weights_and_their_gradients_take_one_launch_for_32_of_them(device):
    making = HalfWeights(torch.bfloat16)
    weights = [one.requires_grad_() for one in drawn(device, [(64, 64)] * 40)]
    made = []
    launched = kernels_of(lambda: made.append(making.copies(weights)))
    assert [count for name, count in launched.items() if "cast_kernel" in name] == [2]
    assert sum(launched.values()) == 2
    assert_same_bits([copy.detach() for copy in made[-1]], [weight.detach() for weight in weights])
    gradients = drawn(device, [(64, 64)] * 40, torch.bfloat16)
    launched = kernels_of(lambda: torch.autograd.backward(made[-1], gradients))
    assert [count for name, count in launched.items() if "cast_kernel" in name] == [2]
    assert_same_bits([weight.grad for weight in weights], gradients)
