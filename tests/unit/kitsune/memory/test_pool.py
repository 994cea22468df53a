import gc
import threading

import pytest
import torch

from kitsune.errors import KitsuneError, SettingsError, UnfitError
from kitsune.memory import MemoryPool
from kitsune.memory import pool as pool_module

CPU = "cpu"


@pytest.fixture
def pool():
    return MemoryPool("1MB", device=CPU)


# What is handed out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 7, (3, 5), (), (2, 0, 4), torch.Size([4, 4])])
def test_a_tensor_has_the_shape_and_dtype_that_were_asked_for(pool, size, dtype):
    shape = (size,) if isinstance(size, int) else tuple(size)
    tensor = pool.allocate(size, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, CPU)
    assert tensor.is_contiguous() and tensor._base is None
    assert torch.equal(tensor.fill_(1), torch.ones(shape, dtype=dtype))


def test_the_dtype_is_float32_unless_told(pool):
    assert pool.allocate(3).dtype is torch.float32


def test_a_block_that_comes_again_has_the_new_dtype_and_shape(pool):
    address = pool.allocate(100).data_ptr()
    for size, dtype in [((400,), torch.int8), (100, torch.int32), ((5, 10), torch.int64)]:
        tensor = pool.allocate(size, dtype)
        assert (tensor.data_ptr(), tensor.dtype) == (address, dtype)
        assert torch.equal(tensor.fill_(-3), torch.full(tensor.shape, -3, dtype=dtype))
        del tensor
    assert pool.stats.hits == 3


def test_tensors_that_live_together_share_no_memory(pool):
    tensors = [pool.allocate(length).fill_(number) for number, length in enumerate([128, 128, 1, 500, 128])]
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize(("nbytes", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 2048)])
def test_blocks_are_powers_of_two_from_512_bytes_on(pool, nbytes, block):
    tensor = pool.allocate(nbytes, torch.uint8)
    assert pool.stats.used_bytes == block
    assert tensor.untyped_storage().nbytes() == max(nbytes, 1)


def test_gradients_flow_through_tensors_of_the_pool(pool):
    weight = pool.allocate(4).fill_(2.0).requires_grad_()
    (weight * weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [4.0] * 4


# What comes back ------------------------------------------------------------------------------------------------------


def test_dropping_a_tensor_gives_its_block_back(pool):
    """The namesake kept each of 100 dropped tensors for ever, and no allocation was a hit."""
    for _ in range(100):
        pool.allocate(64)
    assert pool.stats.used_bytes == 0
    assert pool.stats.reserved_bytes == 512
    assert pool.stats.hit_rate == 0.99


def holders():
    """Ways to keep the memory of a tensor alive without the tensor."""
    return {
        "view": lambda tensor: tensor[3:5],
        "view of a view": lambda tensor: tensor[3:9][1:].view(torch.int32),
        "storage": lambda tensor: tensor.untyped_storage(),
        "numpy": lambda tensor: tensor.numpy(),
        "detached": lambda tensor: tensor.detach(),
        "saved for backward": lambda tensor: torch.ones(64, requires_grad=True) * tensor,
        "cycle": cycle_with,
    }


def cycle_with(tensor):
    ring = [tensor]
    ring.append(ring)
    return ring


@pytest.mark.parametrize("name", holders())
def test_what_still_uses_the_memory_keeps_the_block(pool, name):
    tensor = pool.allocate(64).fill_(1.0)
    address = tensor.data_ptr()
    holder = holders()[name](tensor)
    del tensor
    assert pool.stats.used_bytes == 512
    assert pool.allocate(64).data_ptr() != address
    del holder
    if name == "cycle":
        gc.collect()
    assert pool.stats.used_bytes == 0


def test_a_tensor_dropped_by_another_thread_comes_back(pool):
    kept = [pool.allocate(64)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert pool.stats.used_bytes == 0


def test_the_garbage_collector_may_run_in_the_midst_of_an_allocation(pool, monkeypatch):
    """It lets go of tensors of the pool in the very thread that holds the pool's lock."""
    collected = []

    def empty(*arguments, **named):
        collected.append(gc.collect())
        return original(*arguments, **named)

    original = torch.empty
    cycle_with(pool.allocate(64))
    monkeypatch.setattr(torch, "empty", empty)
    tensor = pool.allocate(4096)
    assert any(collected)
    assert pool.stats.used_bytes == 4096 * 4
    assert tensor.numel() == 4096


def test_memory_outlives_the_pool():
    pool = MemoryPool(4096, device=CPU)
    tensor = pool.allocate(256).fill_(7.0)
    del pool
    gc.collect()
    noise = [torch.zeros(256) for _ in range(64)]
    assert tensor.eq(7.0).all() and len(noise) == 64
    view = tensor[::2]
    del tensor
    assert view.sum() == 7 * 128


def test_free_gives_the_block_back_while_the_tensor_lives(pool):
    tensor = pool.allocate(64)
    address = tensor.data_ptr()
    pool.free(tensor)
    assert pool.stats.used_bytes == 0
    assert pool.allocate(64).data_ptr() == address


def test_free_takes_a_view_of_the_tensor_too(pool):
    pool.free(pool.allocate((8, 8))[2:, 1])
    assert pool.stats.used_bytes == 0


def test_a_block_that_was_freed_early_does_not_come_back_twice(pool):
    tensor = pool.allocate(64)
    pool.free(tensor)
    other = pool.allocate(64).fill_(3.0)
    del tensor
    gc.collect()
    assert pool.stats.used_bytes == 512
    assert pool.allocate(64).data_ptr() != other.data_ptr()


def test_a_double_free_is_an_error_even_when_the_block_has_a_new_tenant(pool):
    tensor = pool.allocate(64)
    pool.free(tensor)
    tenant = pool.allocate(64)
    assert tenant.data_ptr() == tensor.data_ptr()
    with pytest.raises(SettingsError, match="was freed already"):
        pool.free(tensor)
    assert pool.stats.used_bytes == 512
    pool.free(tenant)
    assert pool.stats.used_bytes == 0


def test_a_new_storage_may_have_the_name_of_one_that_has_just_died(pool, monkeypatch):
    """Another thread drops a tensor after we looked at what came back, and torch puts our storage in its place."""
    kept, names = [], []

    def lent_storage(*arguments):
        names.append(kept.pop().untyped_storage()._cdata)
        storage = original(*arguments)
        names.append(storage._cdata)
        return storage

    original = pool_module.lent_storage
    for _ in range(200):
        kept.append(pool.allocate(64))
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "lent_storage", lent_storage)
            tensor = pool.allocate(64)
        if names[-1] == names[-2]:
            break
    assert names[-1] == names[-2]
    assert pool.stats.used_bytes == 512
    pool.free(tensor)
    assert pool.stats.used_bytes == 0


@pytest.mark.parametrize("stranger", [lambda: torch.empty(64), lambda: MemoryPool(512, CPU).allocate(64)])
def test_a_tensor_of_somebody_else_is_refused(pool, stranger):
    with pytest.raises(SettingsError, match="not of this pool"):
        pool.free(stranger())


def test_what_is_no_tensor_is_refused(pool):
    with pytest.raises(SettingsError, match="not list"):
        pool.free([1, 2])


# The limit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "nbytes"), [("2GB", 2 << 30), ("512MB", 512 << 20), ("4 kb", 4096), (1000, 1000)])
def test_the_size_is_bytes_or_a_string(size, nbytes):
    assert MemoryPool(pool_size=size, device=CPU).pool_size == nbytes


@pytest.mark.parametrize("size", ["", "much", "-1", 0, -5, None, "2XB", True])
def test_a_size_without_sense_is_refused_by_name(size):
    with pytest.raises(SettingsError, match="pool_size is"):
        MemoryPool(size, device=CPU)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UnfitError, match="not supported"):
        MemoryPool(512, device="mps")


def test_the_error_of_a_full_pool_says_size_used_and_limit():
    pool = MemoryPool(2048, device=CPU)
    kept = pool.allocate(256)
    with pytest.raises(KitsuneError, match=r"2,048 bytes.*1,024 of its pool_size of 2,048"):
        pool.allocate(300)
    assert pool.stats.allocations == 1
    del kept
    assert pool.allocate(300).numel() == 300


def test_free_blocks_of_other_sizes_make_room():
    pool = MemoryPool(4096, device=CPU)
    for nbytes in (512, 1024, 2048):
        pool.allocate(nbytes, torch.uint8)
    assert pool.stats.reserved_bytes == 3584
    pool.allocate(4096, torch.uint8)
    assert pool.stats.reserved_bytes == 4096
    assert pool.stats.hits == 0


def test_a_device_without_memory_gets_the_free_blocks_back_first(pool, monkeypatch):
    refused = []

    def empty(*size, **named):
        if size == (8192,) and not refused:
            refused.append(pool._reserved_bytes)
            raise torch.OutOfMemoryError("injected")
        return original(*size, **named)

    original = torch.empty
    pool.allocate(64)
    monkeypatch.setattr(torch, "empty", empty)
    pool.allocate(8192, torch.uint8)
    assert refused == [512]
    assert pool.stats.reserved_bytes == 8192


def test_trim_gives_back_what_is_not_used(pool):
    kept = pool.allocate(64).fill_(1.0)
    pool.allocate(1000)
    pool.trim()
    assert pool.stats.reserved_bytes == pool.stats.used_bytes == 512
    assert kept.sum() == 64


@pytest.mark.parametrize("size", [-1, (2, -3), "12", 1.5, (1.5,), None])
def test_a_shape_without_sense_is_refused(pool, size):
    with pytest.raises(SettingsError, match="size is"):
        pool.allocate(size)


def test_a_dtype_that_is_none_is_refused(pool):
    with pytest.raises(SettingsError, match="dtype is"):
        pool.allocate(3, float)


def test_stats_count_blocks(pool):
    assert pool.stats.hit_rate is None
    first, second = pool.allocate(64), pool.allocate(256)
    del first
    third = pool.allocate(100)
    stats = pool.stats
    assert (stats.allocations, stats.hits, stats.hit_rate) == (3, 1, 1 / 3)
    assert (stats.used_bytes, stats.peak_bytes, stats.reserved_bytes) == (1536, 1536, 1536)
    del second, third
    assert (pool.stats.used_bytes, pool.stats.peak_bytes) == (0, 1536)


def test_many_threads_never_share_a_block():
    pool = MemoryPool("64MB", device=CPU)
    wrong, errors = [], []

    def worker(number):
        try:
            for turn in range(150):
                tensors = [pool.allocate(size).fill_(number) for size in (10, 200, 10, 1000)]
                if turn % 2:
                    pool.free(tensors.pop())
                wrong.extend(tensor for tensor in tensors if not tensor.eq(number).all())
        except KitsuneError as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, errors) == ([], [])
    stats = pool.stats
    assert (stats.allocations, stats.used_bytes) == (6 * 150 * 4, 0)
    assert stats.reserved_bytes <= 6 * 2 * (512 * 2 + 1024 + 4096)  # a turn begins before the last one's list is gone
