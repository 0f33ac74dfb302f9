import dataclasses
import errno
import gc
import weakref

import pytest
import torch

from lorakeet.lora.adapter import Slot
from lorakeet.lora.host_memory import Pages
from support.pools import SPECS, poisoned_pool, random_adapter, same_rank
from support.servers import wait_until

CUDA = torch.device("cuda")


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 5000, 9_000_001])
def test_pages_are_zeros_that_are_aligned(num_bytes: int) -> None:
    for _ in range(8):  # also in memory that was used before
        block = Pages(num_bytes).tensor()
        assert block.nbytes == num_bytes
        assert block.data_ptr() % 4096 == 0
        assert not block.any()
        block.fill_(255)


def test_a_kernel_without_huge_pages_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Pages, advice: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Pages, "madvise", refuse)
    assert not Pages(5000).tensor().any()


def test_memory_that_is_short_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        Pages(2**62)


def test_pages_are_freed_with_the_last_tensor() -> None:
    pages = Pages(5000)
    gone, part = weakref.ref(pages), pages.tensor()[7:].view(torch.int8)
    del pages
    assert gone() is not None
    del part
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [1, 5000, 84_000_000])
def test_the_device_copies_pinned_pages_by_itself(num_bytes: int) -> None:
    """The host does not wait for it; and they can be pinned again where others were."""
    for _ in range(8):
        pages = Pages(num_bytes)
        block = pages.tensor().fill_(7)
        assert not block.is_pinned()
        pages.pin(CUDA)
        assert block.is_pinned()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        copy = block.to(CUDA, non_blocking=True)
        assert not torch.cuda.current_stream().query()
        assert copy.eq(7).all()
        del pages, block


@pytest.mark.gpu
def test_an_adapter_is_held_until_the_device_has_copied_it() -> None:
    """Also when it is put out of host memory meanwhile, and its pages are wanted by others."""
    pool = poisoned_pool(3, 3, device="cuda")
    values = random_adapter(same_rank(3), 1)
    pages = Pages(sum(each.a.nbytes + each.b.nbytes for each in values.groups.values()))
    groups, position = {}, 0
    for name, group in values.groups.items():
        tensors = []
        for each in (group.a, group.b):
            block = pages.tensor().view(torch.float32)[position : position + each.numel()]
            tensors.append(block.view(each.shape).copy_(each))
            position += each.numel()
        groups[name] = dataclasses.replace(group, a=tensors[0], b=tensors[1])
    pages.pin(CUDA)
    adapter = dataclasses.replace(values, groups=groups)
    gone = weakref.ref(pages)
    del pages, groups, tensors, block
    torch.cuda.synchronize()
    with pool._copies.use():
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    write = pool.write(Slot(1), range(3), adapter)
    del adapter
    gc.collect()
    assert not write.done()
    assert gone() is not None
    write.result()
    for spec in SPECS:
        found = pool.layer(spec.name, 0).b[:3].cpu()
        assert torch.equal(found, values.groups[spec.name].b[0])
    del write
    wait_until(lambda: gone() is None, "its pages are freed")


@pytest.mark.gpu
def test_pinning_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        pages = Pages(5000)
        pages.pin(CUDA)
        pages.pin(CUDA)  # is refused the second time
    assert caplog.text.count("cannot be pinned") == 1
    assert torch.ones(3, device=CUDA).sum() == 3  # nothing is left of the error
