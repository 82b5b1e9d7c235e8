"""The processes of a plan: those that exchange keys with one another, and those that exchange heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidProblem, wrong_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Ranks(NamedTuple):
    """The groups of this process. Rank r of the plan is rank r // heads_size of a `keys` group and rank r % heads_size
    of a `heads` group. A group of one process is None.
    """

    keys: ProcessGroup | None
    heads: ProcessGroup | None
    keys_size: int
    heads_size: int
    keys_rank: int
    heads_rank: int

    @property
    def rank(self) -> int:
        return self.keys_rank * self.heads_size + self.heads_rank

    @property
    def levels(self) -> list[ProcessGroup]:
        """The groups, inner group first."""
        return [group for group in (self.heads, self.keys) if group is not None]

    @staticmethod
    def of(keys: ProcessGroup | None, heads: ProcessGroup | None) -> Ranks:
        count = lambda group: 1 if group is None else dist.get_world_size(group)
        place = lambda group: 0 if group is None else dist.get_rank(group)
        return Ranks(keys, heads, count(keys), count(heads), place(keys), place(heads))


def groups_of(processes: Any) -> list[ProcessGroup]:
    """The groups of a mesh's dimensions, the group itself, or the default group for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidProblem(
            "context_parallel",
            "no process group",
            "torch.distributed to be initialized",
            "call torch.distributed.init_process_group first, as torchrun scripts do",
        )
    if processes is None:
        return [cast("ProcessGroup", dist.group.WORLD)]
    if hasattr(processes, "get_all_groups"):  # a DeviceMesh; importing its class takes 300 ms
        return list(processes.get_all_groups())
    if not isinstance(processes, dist.ProcessGroup):
        raise wrong_type(
            "context_parallel group", processes, "a ProcessGroup, a DeviceMesh or None", "pass mesh['cp'] or a group"
        )
    return [processes]


class Transfer:
    """Contiguous tensors on their way between ranks of a group, without copies. Two ranks name the tensors that pass
    between them in the same order. Empty lists are allowed.
    """

    def __init__(
        self,
        given: Sequence[tuple[int, Tensor]],
        taken: Sequence[tuple[int, Tensor]],
        group: ProcessGroup | None,
        all_to_all: torch.device | None = None,
    ):
        """given: the target rank in the group and the tensor to send. taken: the source rank and the tensor to fill.
        all_to_all: the device of the tensors, if one call of NCCL's is to exchange them, which takes less of the host's
        time. All ranks of the group must make it, and each may send at most one tensor to each other rank.
        """
        self.alive = given, taken  # until the transfer is over
        if all_to_all is not None:
            nothing = torch.empty(0, dtype=torch.uint8, device=all_to_all)
            leaving, arriving = ([nothing] * dist.get_world_size(group) for _ in range(2))
            for tensors, several in ((leaving, given), (arriving, taken)):
                for rank, tensor in several:
                    tensors[rank] = _bytes(tensor)
            self.works = [cast("Work", dist.all_to_all(arriving, leaving, group=group, async_op=True))]
            return
        transfers = [(dist.isend, *one) for one in given] + [(dist.irecv, *one) for one in taken]
        operations = [
            dist.P2POp(operation, _bytes(tensor), group=group, group_peer=rank)
            for operation, rank, tensor in transfers
            if tensor.numel()
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Make the current stream, or on a CPU the process, wait for what comes."""
        for work in self.works:
            work.wait()
        self.works, self.alive = [], ()


class Exchange:
    """Rows on their way between the ranks of a group. `wait` returns what this rank receives, in the order of ranks."""

    def __init__(self, send: Tensor, counts: tuple[Sequence[int], Sequence[int]], group: ProcessGroup | None):
        """send: [rows, ...], contiguous, rows for rank 0 first. counts: rows to each rank, and from each rank."""
        given, taken = counts
        self.received = send.new_empty((sum(taken), *send.shape[1:]))
        width = send[:1].numel() * send.element_size() if len(send) else 0
        width = width or self.received[:1].numel() * send.element_size()
        self.work: Work | None = dist.all_to_all_single(
            _bytes(self.received),
            _bytes(send),
            [count * width for count in taken],
            [count * width for count in given],
            group=group,
            async_op=True,
        )
        self.send = send  # alive until the exchange is over

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
            del self.send
        return self.received


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes, since not every backend takes every dtype."""
    return tensor.view(-1).view(torch.uint8)
