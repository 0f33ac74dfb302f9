"""What each rank of a process group checks of things that all have, or none."""

import torch

from lorakeet.models.process_group import ProcessGroup, by_all

_FAILING: list[set[int]] = [set(), {0}, {1}, {0, 1}, set()]  # ranks; one case after the other


def check_by_all(group: ProcessGroup) -> None:
    """Nobody is a call behind, or ahead, after any of them."""
    for number, failing in enumerate(_FAILING):

        def make(device: torch.device, number: int = number, failing: set[int] = failing) -> int:
            assert device.type == "cpu"
            if group.rank in failing:
                raise RuntimeError("there is no memory that others see")
            return group.rank + 10 * number  # 0 is something, too

        made = by_all(make, torch.device("cpu"))
        assert made == (None if failing else group.rank + 10 * number), failing
        total = group.all_reduce(torch.tensor([group.rank + 1 + number]))
        assert total.tolist() == [3 + 2 * number], failing
