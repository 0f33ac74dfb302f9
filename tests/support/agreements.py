"""What each rank of a process group checks of things that all have, or none."""

import socket
from pathlib import Path

import torch
import torch.distributed as dist

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


def check_listeners(group: ProcessGroup) -> None:
    """No rank holds a socket on which another listens."""
    ports: list[set[int]] = [set() for _ in range(group.size)]
    dist.all_gather_object(ports, _listening_ports())
    assert ports[0]
    assert len(set().union(*ports)) == sum(map(len, ports)), ports


def _listening_ports() -> set[int]:
    """Of this process's own sockets, and of those that it was started with."""
    ports = set()
    for file in Path("/dev/fd").iterdir():
        try:
            with socket.fromfd(int(file.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(copy.getsockname()[1])
        except OSError:  # no socket
            continue
    return ports
