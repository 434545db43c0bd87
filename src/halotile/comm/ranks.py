"""`Ranks`: the group-local view that everything above uses, whatever carries the messages."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from halotile.comm.torch_group import TorchTransport
from halotile.comm.transport import Counters, Transport
from halotile.comm.virtual import VirtualGroup
from halotile.errors import MembershipError, PlanError

DEFAULT_TIMEOUT_S = 300.0


class Ranks:
    """The ranks of one group as one of its members sees them.

    Every rank number in halotile is group-local, 0 to `size` - 1; `global_rank` maps to the program's own numbers. For
    the group (2, 5) of a world of 8, global rank 5 is rank 1 and `Ranks.of(group).global_rank(1)` is 5.
    """

    def __init__(self, transport: Transport, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise PlanError(f"timeout_s must be positive, got {timeout_s}")
        self.transport = transport
        self.timeout_s = timeout_s

    @classmethod
    def of(cls, group: Group | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """The ranks of a process group or of one axis of a device mesh; without torch.distributed, this process alone.

        `None` is the program's default group where torch.distributed is initialised. A `DeviceMesh` must have one
        axis, such as `mesh["vae"]`. `timeout_s` bounds the wait for ranks that do not come, or make no progress.
        Raises MembershipError for a process outside the group, and for a mesh of several axes.
        """
        if isinstance(group, Ranks):
            return group
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise MembershipError(
                    f"got the group {group!r}, but torch.distributed is not initialised in this process; "
                    "call torch.distributed.init_process_group first, or pass group=None to run on one rank"
                )
            started = os.environ.get("WORLD_SIZE", "1")
            if started not in ("", "1"):
                raise MembershipError(
                    f"torchrun started {started} ranks, but torch.distributed is not initialised, so each would work "
                    "alone; call torch.distributed.init_process_group first, or pass group=halotile.Ranks.alone()"
                )
            return cls.alone(timeout_s)
        if isinstance(group, DeviceMesh):
            group = _axis(group)
        world = dist.group.WORLD
        assert world is not None
        return cls(TorchTransport.of(world if group is None else group), timeout_s)

    @classmethod
    def alone(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """A group of this process only."""
        return cls(VirtualGroup(1).transport(0), timeout_s)

    @property
    def rank(self) -> int:
        """This process's group-local rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self.transport.size

    @property
    def counters(self) -> Counters:
        """This rank's traffic since the group was first used."""
        return self.transport.counters

    @property
    def others(self) -> list[int]:
        """The ranks of the group but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def global_rank(self, rank: int) -> int:
        """The program's number of group-local `rank`. Raises MembershipError when the group has no such rank."""
        self.check(rank, "rank")
        return self.transport.global_rank(rank)

    def check(self, rank: int, what: str) -> None:
        """Raise MembershipError unless `rank` is one of the group."""
        if not 0 <= rank < self.size:
            raise MembershipError(
                f"{what}={rank} is not a rank of this group of {self.size}; ranks are group-local, 0 to {self.size - 1}"
            )


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Ranks
"""What a call can run over: a process group, one axis of a mesh, or the ranks of either."""


def _axis(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of a mesh that is one axis."""
    names = mesh.mesh_dim_names
    if mesh.ndim != 1:
        choose = " or ".join(f'mesh["{name}"]' for name in names or ("vae",))
        without = "" if names else ", of a mesh that is made with mesh_dim_names"
        raise MembershipError(
            f"got a DeviceMesh of {mesh.ndim} axes, shape {tuple(mesh.shape)}; a call runs over the ranks of one: pass "
            f"{choose}{without}"
        )
    if mesh.get_coordinate() is None:
        raise MembershipError(
            f"process {dist.get_rank()} of {dist.get_world_size()} is not in the DeviceMesh it passed, whose ranks are "
            f"{mesh.mesh.tolist()}; only those may make this call"
        )
    return mesh.get_group()
