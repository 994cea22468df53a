"""The rooms of `kitsune.memory` on a GPU: what streams do to memory, with kernels slow enough to lose a race."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kitsune.errors import CaptureError
from kitsune.memory import DoubleBuffer, MemoryPool, Prefetcher
from tests.kernel_checks import SLOW_CYCLES

LENGTH = 1 << 20


@pytest.fixture(autouse=True)
def warm(device):
    """Kernels are loaded and memory is at hand, so that nothing after a slow kernel waits for it."""
    many = [torch.zeros(LENGTH, device=device) for _ in range(12)]
    label = torch.tensor([1]).to(device)
    several = [many[0].sum(), many[0].amax(), many[0].clone(), many[0] * 2, label[0] + many[1].sum(), label.clone()]
    assert not several[0].item()
    torch.cuda._sleep(1)


def is_done(stream):
    """Whether a stream has nothing left to do. Right after a slow kernel it must have, or the test shows no race."""
    return stream.query()


# The pool -------------------------------------------------------------------------------------------------------------


def test_memory_of_the_pool_is_memory_of_the_gpu(device):
    pool = MemoryPool("64MB", device)
    tensor = pool.allocate((16, 16), torch.bfloat16)
    assert (tensor.device, tensor.dtype, tensor.shape) == (device, torch.bfloat16, (16, 16))
    assert torch.equal(tensor.fill_(3), torch.full((16, 16), 3.0, dtype=torch.bfloat16, device=device))
    address = tensor.data_ptr()
    view = tensor[3:]
    del tensor
    assert pool.stats.used_bytes == 512
    del view
    assert pool.stats.used_bytes == 0
    assert pool.allocate(100, torch.int32).data_ptr() == address
    assert pool.stats.hits == 1


def test_memory_outlives_the_pool(device):
    pool = MemoryPool("64MB", device)
    tensor = pool.allocate(LENGTH).fill_(7.0)
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    noise = [torch.zeros(LENGTH, device=device) for _ in range(8)]
    assert tensor.eq(7.0).all() and len(noise) == 8


def test_what_autograd_saved_keeps_its_block(device):
    pool = MemoryPool("64MB", device)
    weight = torch.full((LENGTH,), 2.0, device=device, requires_grad=True)
    loss = (weight * pool.allocate(LENGTH).fill_(3.0)).sum()
    pool.allocate(LENGTH).fill_(9.0)
    loss.backward()
    assert weight.grad.eq(3.0).all()
    assert pool.stats.used_bytes == 0


@pytest.mark.parametrize("release", ["drop", "free"])
def test_another_stream_gets_a_block_only_after_the_work_of_the_first(device, release):
    pool = MemoryPool("64MB", device)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(first):
        copy = torch.zeros(LENGTH, device=device)
        tensor = pool.allocate(LENGTH).fill_(1.0)
        address = tensor.data_ptr()
        torch.cuda._sleep(SLOW_CYCLES)
        copy.copy_(tensor)
        if release == "free":
            pool.free(tensor)
        del tensor
    assert not is_done(first)
    with torch.cuda.stream(second):
        other = pool.allocate(LENGTH).fill_(2.0)
    assert other.data_ptr() == address
    torch.cuda.synchronize(device)
    assert copy.eq(1.0).all()
    assert other.eq(2.0).all()


def test_the_stream_that_lets_go_is_waited_for_too(device):
    pool = MemoryPool("64MB", device)
    reader = torch.cuda.Stream(device)
    tensor = pool.allocate(LENGTH).fill_(1.0)
    copy = torch.zeros(LENGTH, device=device)
    reader.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copy.copy_(tensor)
        del tensor
    assert not is_done(reader)
    pool.allocate(LENGTH).fill_(2.0)
    torch.cuda.synchronize(device)
    assert pool.stats.hits == 1
    assert copy.eq(1.0).all()


def test_blocks_that_are_trimmed_are_not_torchs_before_their_work_has_ended(device):
    pool = MemoryPool("64MB", device)
    side = torch.cuda.Stream(device)
    pool.allocate(LENGTH)  # the block is of the current stream, to torch too
    with torch.cuda.stream(side):
        copy = torch.zeros(LENGTH, device=device)
        tensor = pool.allocate(LENGTH).fill_(1.0)
        torch.cuda._sleep(SLOW_CYCLES)
        copy.copy_(tensor)
        del tensor
    assert pool.stats.hits == 1
    pool.trim()
    assert pool.stats.reserved_bytes == 0
    assert not is_done(side)
    noise = [torch.full((LENGTH,), 5.0, device=device) for _ in range(4)]
    torch.cuda.synchronize(device)
    assert copy.eq(1.0).all() and len(noise) == 4


def test_no_block_is_handed_out_or_used_again_in_a_capture(device):
    pool = MemoryPool("64MB", device)
    tensor = pool.allocate(LENGTH).fill_(1.0)
    result = torch.zeros(LENGTH, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="before the capture"):
            pool.allocate(LENGTH)
        result.copy_(tensor)
        view = tensor[:4]
        del tensor, view
    assert pool.stats.used_bytes == pool.stats.reserved_bytes == 0
    assert pool.allocate(LENGTH).numel() == LENGTH
    assert pool.stats.hits == 0


# The prefetcher -------------------------------------------------------------------------------------------------------


def batches_of(count):
    for number in range(count):
        yield {"x": torch.full((LENGTH,), float(number)), "rest": (torch.tensor([number]), "text")}


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_a_slow_consumer_reads_every_batch_as_it_was(device, lookahead):
    """Each batch is dropped while its kernel has not begun; without record_stream its memory is the next batch's."""
    results = []
    waited = 0
    for batch in Prefetcher(device, lookahead).wrap(batches_of(12)):
        assert batch["x"].device == batch["rest"][0].device == device
        assert batch["rest"][1] == "text"
        torch.cuda._sleep(SLOW_CYCLES)
        results.append((batch["x"].sum(), batch["x"].amax(), batch["rest"][0].clone()))
        waited += not is_done(torch.cuda.current_stream(device))
        del batch
    assert waited == 12
    for number, (total, largest, label) in enumerate(results):
        assert (total.item(), largest.item(), label.item()) == (float(number) * LENGTH, number, number)


def test_a_consumer_on_a_stream_of_its_own_waits_for_the_copy(device):
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        sums = [batch["x"].sum() for batch in Prefetcher(device).wrap(batches_of(12))]
    torch.cuda.synchronize(device)
    assert [total.item() for total in sums] == [float(number) * LENGTH for number in range(12)]


def test_batches_cut_on_the_gpu_wait_for_what_made_them(device):
    data, numbers = torch.zeros(8, LENGTH, device=device), torch.arange(8.0, device=device).view(8, 1)
    torch.cuda._sleep(SLOW_CYCLES)
    data += numbers
    assert not is_done(torch.cuda.current_stream(device))
    loader = (row * 2 for row in data)
    assert [batch.mean().item() for batch in Prefetcher(device).wrap(loader)] == [2.0 * n for n in range(8)]


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 1}])
def test_a_data_loader_gives_the_same_batches_as_alone(device, options):
    data = TensorDataset(torch.arange(4000.0).view(1000, 4), torch.arange(1000))
    loader = DataLoader(data, batch_size=96, **options)
    alone = list(loader)
    pairs = list(zip(Prefetcher(device).wrap(loader), alone, strict=True))
    assert len(pairs) == len(loader) == 11
    assert all(torch.equal(ours.cpu(), plain) for pair in pairs for ours, plain in zip(*pair, strict=True))


def test_leaving_early_leaves_nothing_on_the_gpu(device):
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    for batch in Prefetcher(device, 4).wrap(batches_of(50)):
        assert batch["x"].device == device
        break
    del batch
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()  # takes in what streams have done with freed memory
    assert torch.cuda.memory_allocated(device) == before


# The double buffer ----------------------------------------------------------------------------------------------------


def test_copies_and_slow_work_wait_for_each_other(device):
    buffer = DoubleBuffer(LENGTH * 4, device)
    buffer.prefetch_next(torch.zeros(LENGTH))
    results = []
    for number in range(1, 13):
        current = buffer.get_current()
        buffer.prefetch_next(torch.full((LENGTH,), float(number)))
        torch.cuda._sleep(SLOW_CYCLES)
        results.append((current.sum(), current.amax()))
        assert not is_done(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    assert [(total.item(), largest.item()) for total, largest in results] == [
        (float(number) * LENGTH, number) for number in range(12)
    ]


def test_a_batch_on_the_gpu_is_copied_after_the_work_that_makes_it(device):
    buffer = DoubleBuffer(LENGTH * 4, device)
    torch.cuda._sleep(SLOW_CYCLES)
    buffer.prefetch_next(torch.full((LENGTH,), 3.0, device=device))
    noise = torch.zeros(LENGTH, device=device)  # where the batch was, if torch gave its memory too early
    assert not is_done(torch.cuda.current_stream(device))
    assert buffer.get_current().eq(3.0).all() and not noise.any()


def test_graphs_read_the_two_buffers_in_turn(device):
    buffer = DoubleBuffer(LENGTH * 4 + 512, device)
    total = torch.zeros((), device=device)
    graphs = {}
    for _ in range(2):
        buffer.prefetch_next([torch.zeros(LENGTH), torch.tensor([0])])
        x, label = buffer.get_current()
        graphs[x.data_ptr()] = captured(lambda x=x, label=label: total.copy_(x.sum() + label[0]))
    assert len(graphs) == 2
    results = []
    buffer.prefetch_next([torch.zeros(LENGTH), torch.tensor([0])])
    for number in range(1, 13):
        x, _ = buffer.get_current()
        buffer.prefetch_next([torch.full((LENGTH,), float(number)), torch.tensor([number])])
        torch.cuda._sleep(SLOW_CYCLES)
        graphs[x.data_ptr()].replay()
        results.append(total.clone())
    torch.cuda.synchronize(device)
    assert [result.item() for result in results] == [float(number) * (LENGTH + 1) for number in range(12)]


def captured(work):
    """A graph of the work, which ran once before on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_a_buffer_is_not_touched_during_a_capture(device):
    buffer = DoubleBuffer(64, device)
    buffer.prefetch_next(torch.ones(4))
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=device)
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(CaptureError, match="before the capture"):
            buffer.get_current()
    assert buffer.get_current().tolist() == [1.0] * 4
