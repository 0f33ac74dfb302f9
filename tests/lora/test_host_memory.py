import weakref

import pytest
import torch

from lorakeet.lora.host_memory import Pages

CUDA = torch.device("cuda")


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 5000, 9_000_001])
def test_pages_are_zeros_that_are_aligned(num_bytes: int) -> None:
    for _ in range(8):  # also in memory that was used before
        block = Pages(num_bytes).tensor(num_bytes)
        assert block.nbytes == num_bytes
        assert block.data_ptr() % 4096 == 0
        assert not block.any()
        block.fill_(255)


def test_pages_are_freed_with_the_last_tensor() -> None:
    pages = Pages(5000)
    gone, part = weakref.ref(pages), pages.tensor(5000)[7:].view(torch.int8)
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
        block = pages.tensor(num_bytes).fill_(7)
        assert not block.is_pinned()
        pages.pin(CUDA)
        assert block.is_pinned()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        copy = block.to(CUDA, non_blocking=True)
        assert not torch.cuda.current_stream().query()
        assert copy.eq(7).all()
        del pages, block


@pytest.mark.gpu
def test_pinning_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(5000)
    pages.pin(CUDA)
    pages.pin(CUDA)  # is refused the second time
    assert "cannot be pinned" in caplog.text
    assert torch.ones(3, device=CUDA).sum() == 3  # nothing is left of the error
