"""Casts of many tensors in few launches against torch: shapes, dtypes, layouts, what is left to torch, the engine.

Triton's interpreter cuts bf16 off and does not round it: fp16 is compared to the bit.
"""

import pytest
import torch

from kitsune.kernels import casts as kernel
from kitsune.kernels import launch
from kitsune.kernels.casts import cast_all
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.transforms.splitting import split
from tests.unit.kitsune.launches.steps import names, recorded

SHAPES = [(5, 3), (), (4100,), (0,), (2, 3, 4, 5), (8192,), (1,), (4096,), (3, 0, 2)]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
interpreted = pytest.mark.skipif(not launch.IS_INTERPRETED, reason="tests/gpu/test_casts_kernel.py has it on a GPU")


@pytest.fixture(autouse=True)
def short_launches(monkeypatch):
    """The interpreter takes some milliseconds for every tensor of a launch, also for what fills it up."""
    monkeypatch.setattr(kernel, "MOST", 4)


@pytest.fixture
def no_way_out(monkeypatch):
    """The reference is out of reach: what is cast is cast by the kernel."""
    monkeypatch.setattr(kernel, "reference", None)


def drawn(device, shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(0)
    return [(100 * torch.randn(shape, device=device)).to(dtype) for shape in shapes]


def cast_to(dtype, sources):
    """What becomes of targets of their layouts."""
    targets = [torch.empty_like(source, dtype=dtype).fill_(7) for source in sources]
    cast_all(targets, sources)
    return targets


def assert_cast(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        wanted = source.to(target.dtype)
        is_cut = launch.IS_INTERPRETED and target.dtype == torch.bfloat16
        torch.testing.assert_close(target, wanted, rtol=2**-7 if is_cut else 0, atol=0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_values_are_those_of_torch(device, no_way_out, given, wanted):
    sources = drawn(device, dtype=given)
    assert_cast(cast_to(wanted, sources), sources)


def test_dtypes_may_be_mixed_on_both_sides(device, no_way_out):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    sources = [one.to(dtype) for dtype in dtypes for one in drawn(device, [(9,), (4097,)])]
    targets = [torch.empty_like(one, dtype=dtype) for one, dtype in zip(sources, dtypes * 2, strict=True)]
    cast_all(targets, sources)
    assert_cast(targets, sources)


def test_ties_round_to_even_and_what_is_not_finite_stays(device, no_way_out):
    given = [1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65519.0, -0.0, torch.inf, -torch.inf, torch.nan, 2**-24, 2**-25]
    source = torch.tensor(given, device=device)
    (target,) = cast_to(torch.float16, [source])
    assert torch.equal(target.isnan(), source.isnan())
    assert torch.equal(target.nan_to_num(0.5).view(torch.int16), source.half().nan_to_num(0.5).view(torch.int16))


def test_what_does_not_fit_into_one_launch_goes_into_the_next(device, no_way_out):
    sources = drawn(device, [(n,) for n in (3, 1, 0, 16, 4097, 7, 2, 0, 9, 8192, 8)])
    targets = cast_to(torch.float16, sources)
    assert_cast(targets, sources)
    grids = [grid for grid, *_ in kernel.launches(zip(targets, sources, strict=True))]
    assert grids == [(5,), (5,), (1,)]


def test_for_any_sizes_triton_gets_numbers_of_one_kind(device):
    """For 1 and for multiples of 16 it would compile another kernel."""
    for sizes in ((1,), (16, 1, 4096), (1, 2**16, 3, 4097)):
        sources = drawn(device, [(size,) for size in sizes])
        targets = [one.half() for one in sources]
        (((programs,), *tensors, given, begins),) = kernel.launches(zip(targets, sources, strict=True))
        assert [len(each) for each in (*tensors, given, begins)] == [4, 4, 4, 3]
        assert all(number % 2 == 1 and number > 1 for number in (*given, *begins))
        assert programs == sum(-(-size // kernel.BLOCK) for size in sizes)


@pytest.mark.parametrize("size", [7, 4096, 4099])
@pytest.mark.parametrize("shifts", [(1, 0), (0, 1), (3, 1)])
def test_tensors_may_lie_at_odd_addresses(device, no_way_out, size, shifts):
    rooms = torch.randn(9000, device=device), torch.zeros(9000, device=device, dtype=torch.float16)
    source, target = (room[shift:][:size] for room, shift in zip(rooms, shifts, strict=True))
    others = drawn(device, [(size,)])
    targets = [target, others[0].half().zero_()]
    cast_all(targets, [source, *others])
    assert_cast(targets, [source, *others])


def test_tensors_at_odd_addresses_take_no_wide_loads_from_others(device):
    sources = [torch.randn(8, device=device)[shift:][:4] for shift in (0, 1, 0, 0, 2)]
    targets = [torch.empty(4, device=device, dtype=torch.float16) for _ in sources]
    found = [{one.data_ptr() for one in ours} for _, _, ours, *_ in kernel.launches(zip(targets, sources, strict=True))]
    assert found == [{sources[at].data_ptr() for at in group} for group in ((0, 2, 3), (1, 4))]


@pytest.mark.parametrize("size", [1, 4095, 4097])
def test_what_lies_behind_a_target_stays(device, no_way_out, size):
    (source,) = drawn(device, [(size,)])
    room = torch.full((9000,), 5.0, device=device, dtype=torch.float16)
    cast_all([room[:size]], [source])
    assert torch.equal(room[:size], source.half())
    assert (room[size:] == 5).all()


def test_any_order_of_dimensions_is_kept(device, no_way_out):
    image = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    sources = [image, torch.randn(6, 4, device=device).t(), torch.randn(2, 3, 4, device=device).permute(1, 2, 0)]
    targets = cast_to(torch.float16, sources)
    assert [one.stride() for one in targets] == [one.stride() for one in sources]
    assert_cast(targets, sources)


@pytest.mark.parametrize("case", ["gaps", "strides", "repeated", "shapes", "doubles", "integers"])
def test_what_the_kernel_does_not_serve_is_copied_all_the_same(device, monkeypatch, case):
    source, target = torch.randn(6, 4, device=device), torch.zeros(6, 4, device=device, dtype=torch.float16)
    if case == "gaps":
        source, target = torch.randn(6, 8, device=device)[:, ::2], torch.zeros(6, 8, device=device).half()[:, ::2]
    if case == "strides":
        source = torch.randn(4, 6, device=device).t()
    if case == "repeated":
        source = torch.randn(4, device=device).expand(6, 4)
    if case == "shapes":
        source = torch.randn(4, device=device)
    if case in ("doubles", "integers"):
        source = source.to({"doubles": torch.float64, "integers": torch.int32}[case])
    cast, seen = kernel.cast, []
    monkeypatch.setattr(kernel, "cast", lambda *lists: seen.append(len(lists[0])) or cast(*lists))
    (other,) = drawn(device, [(9,)])
    targets = [target, torch.zeros_like(other, dtype=torch.float16)]
    cast_all(targets, [source, other])
    assert torch.equal(targets[0], source.half().expand(6, 4))
    assert torch.equal(targets[1], other.half())
    assert seen == ([] if case in ("doubles", "integers") else [1])


def test_without_triton_on_this_device_torch_copies(device, monkeypatch):
    monkeypatch.setattr(kernel, "cast", None)
    monkeypatch.setattr(kernel, "runs_in_triton", lambda *_: False)
    sources = drawn(device)
    targets = cast_to(torch.bfloat16, sources)
    assert all(torch.equal(target, source.bfloat16()) for target, source in zip(targets, sources, strict=True))


def test_nothing_is_no_work(device):
    cast_all([], [])
    kernel.reference([], [])
    cast_all([torch.empty(0, device=device).half()], [torch.empty(0, device=device)])


def test_lists_of_two_lengths_are_refused(device):
    with pytest.raises(ValueError, match="shorter"):
        cast_all(drawn(device, [(3,), (2,)]), drawn(device, [(3,)]))


def test_leaves_that_require_gradients_are_read_and_written(device):
    leaf, source = torch.zeros(9, device=device, requires_grad=True), torch.randn(9, device=device).half()
    version = leaf._version
    cast_all([leaf], [source])
    assert leaf.is_leaf and leaf._version > version
    (target,) = cast_to(torch.float16, [leaf])
    assert torch.equal(target, source)
    assert not target.requires_grad


def test_the_operator_is_what_torch_asks_of_one(device):
    sources = drawn(device, [(3,), (2,)])
    torch.library.opcheck(kernel.cast, ([one.half() for one in sources], sources), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_keeps_it_whole(device):
    sources = drawn(device, [(9,), (2, 3)])
    targets = [torch.zeros_like(one, dtype=torch.float16) for one in sources]
    torch.compile(cast_all, fullgraph=True, backend="aot_eager")(targets, sources)
    assert_cast(targets, sources)


# In the engine --------------------------------------------------------------------------------------------------------


def late(sources):
    """The same, where each can be had only behind the one before."""
    made = [sources[0] * 1.0]
    for source in sources[1:]:
        made.append(source + 0.0 * made[-1].sum())
    return made


@interpreted
def test_what_it_reads_and_writes_is_known():
    sources, targets = drawn("cpu", [(4,), (6,)]), drawn("cpu", [(4,), (6,)], torch.float16)
    (launched,) = recorded(lambda: cast_all(targets, sources)).graph.launches
    reads, writes = ({span.storage for span in spans} for spans in (launched.reads, launched.writes))
    assert launched.name == "cast_all"
    assert [len(reads), len(writes), len(reads & writes)] == [2, 2, 0]


@interpreted
def test_it_is_split_into_what_is_ready_first_and_last(monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 80)
    sources, targets = drawn("cpu", [(20,)] * 6), drawn("cpu", [(20,)] * 6, torch.float16)
    recording = recorded(lambda: cast_all(targets, late(sources)))
    smaller = split(recording, 80)
    assert names(smaller).count("cast_all") > names(recording).count("cast_all") == 1
    for target in targets:
        target.zero_()
    in_recorded_order(smaller)()
    assert_cast(targets, sources)
