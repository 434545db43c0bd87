"""`Ranks`: membership, group-local numbers, the process alone; S1: a group's traffic never mixes with the world's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_world
from test_comm_transports import KINDS, on_members, on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halotile.comm import Call, Ranks, fetch_rows, run_virtual
from halotile.comm.torch_group import StoreBoard
from halotile.errors import MembershipError, PlanError
from halotile.geometry import Extents, Interval


def _numbers(ranks):
    return ranks.rank, ranks.size, ranks.others, [ranks.global_rank(rank) for rank in range(ranks.size)]


@pytest.mark.parametrize("members", [(1, 3), (2, 3), (0, 1, 2, 3), (0, 2, 3), (1,)])
def test_group_local_ranks_are_mapped_to_global_ones(members):
    for local, (rank, size, others, mapped) in enumerate(on_members(members, _numbers)):
        assert rank == local
        assert size == len(members)
        assert others == [r for r in range(size) if r != local]
        assert mapped == list(members)


def _out_of_range(ranks, rank):
    texts = []
    for ask in (ranks.global_rank, lambda r: ranks.check(r, "driver")):
        with pytest.raises(MembershipError) as caught:
            ask(rank)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_group_does_not_have(kind, rank):
    for asked, checked in on_ranks(kind, 2, _out_of_range, rank):
        assert f"rank={rank} is not a rank of this group of 2" in asked
        assert f"driver={rank} is not a rank of this group of 2; ranks are group-local, 0 to 1" in checked


def _outsiders(group):
    """World of four: (2, 3) is a group; 0 and 1 are not in it."""
    pair = dist.new_group([2, 3])
    try:
        ranks = Ranks.of(pair)
    except MembershipError as error:
        return pair is dist.GroupMember.NON_GROUP_MEMBER, str(error)
    return ranks.rank, ranks.size


def test_an_outsider_is_told_so_and_does_not_hang():
    """R1."""
    results = run_world(_outsiders, timeout=30)
    for rank in (0, 1):
        handed_non_member, text = results[rank]
        assert handed_non_member
        assert f"process {rank} of 4 is not a member of the group it passed" in text
    assert results[2:] == [(0, 2), (1, 2)]


def _default_group(group):
    assert group is None
    default, again = Ranks.of(None), Ranks.of(dist.group.WORLD)
    return default.rank, default.size, default.transport is again.transport, Ranks.of(default) is default


def test_none_is_the_default_group():
    assert run_world(_default_group, timeout=30) == [(rank, 4, True, True) for rank in range(4)]


def _axes(_):
    """Four ranks as two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("transformer", "vae"))
    found = [_numbers(Ranks.of(mesh[name])) for name in mesh.mesh_dim_names]
    ranks = Ranks.of(mesh["vae"])
    with Call(ranks) as call:
        call.meet({"any": "thing"})
        summed = int(ranks.transport.all_reduce(torch.tensor([float(dist.get_rank())])))
    return found, summed, ranks.transport is Ranks.of(mesh["vae"].get_group()).transport


def test_an_axis_of_a_device_mesh_is_a_group():
    results = run_world(_axes, timeout=60)
    for rank, (found, summed, same) in enumerate(results):
        row, column = divmod(rank, 2)
        assert found == [
            (row, 2, [1 - row], [column, column + 2]),
            (column, 2, [1 - column], [2 * row, 2 * row + 1]),
        ]
        assert summed == [1, 5][row]
        assert same


def _meshes_that_cannot_be(_):
    texts = []
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("transformer", "vae"))
    for mesh in (named, init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [1, 2])):
        try:
            texts.append(Ranks.of(mesh).size)
        except MembershipError as error:
            texts.append(str(error))
    return texts


def test_a_mesh_of_two_axes_and_one_without_this_process_are_refused():
    for rank, (named, unnamed, pair) in enumerate(run_world(_meshes_that_cannot_be, timeout=60)):
        assert "DeviceMesh of 2 axes, shape (2, 2)" in named
        assert named.endswith('pass mesh["transformer"] or mesh["vae"]')
        assert unnamed.endswith('pass mesh["vae"], of a mesh that is made with mesh_dim_names')
        if rank in (1, 2):
            assert pair == 2
        else:
            assert f"process {rank} of 4 is not in the DeviceMesh it passed, whose ranks are [1, 2]" in pair


def _twice(group):
    first, second = Ranks.of(group), Ranks.of(group, timeout_s=3)
    with Call(first):
        pass
    return first.transport is second.transport, second.timeout_s, second.transport.calls == first.transport.calls


def test_a_group_has_one_transport_however_often_it_is_asked_for():
    """Calls are numbered a group, so a second `Ranks.of` must go on counting."""
    assert run_ranks(_twice, 2, timeout=30) == [(True, 3, True)] * 2


def _two_lives(group):
    """Two boards of one group over one store, the second made when the first is out of use."""
    first = StoreBoard(group)
    first.add("count", 1)
    first.set("note", b"")
    dist.barrier(group)
    old = first.add("count", 0), first.get("note")
    dist.barrier(group)
    second = StoreBoard(group)
    dist.barrier(group)
    new = second.add("count", 0), second.get("note")
    dist.barrier(group)
    second.add("count", 5)
    dist.barrier(group)
    return old, new, second.add("count", 0)


def test_a_group_of_the_same_name_over_the_same_store_starts_anew():
    """torchrun keeps its store when a program ends its default group and makes another, of the same name.

    A real second life takes a torchrun of its own: gloo cannot make the pool's groups twice over one file.
    """
    assert run_ranks(_two_lives, 2, timeout=30) == [((2, b""), (0, None), 10)] * 2


def test_without_torch_distributed_this_process_is_alone():
    assert not dist.is_initialized()
    ranks = Ranks.of(None)
    assert _numbers(ranks) == (0, 1, [], [0])
    with Call(ranks) as call:
        call.meet({"any": "thing"})
        with call.together("work"):
            out = fetch_rows(torch.arange(3), 0, Extents((3,)), [Interval(1, 3)], ranks)
    assert torch.equal(out, torch.tensor([1, 2]))
    with pytest.raises(MembershipError, match=r"torch\.distributed is not initialised"):
        Ranks.of(object())


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_is_positive(timeout_s):
    with pytest.raises(PlanError, match="timeout_s must be positive"):
        Ranks.alone(timeout_s)
    with pytest.raises(PlanError, match="timeout_s must be positive"):
        run_virtual(1, lambda transport: Ranks(transport, timeout_s))


def _beside_the_world(_):
    """Members of (1, 3) fetch rows while all four use WORLD, and messages of the program are on their way."""
    me = dist.get_rank()
    group = dist.new_group([1, 3])
    for i in range(6):
        flying = []
        theirs = torch.full((8,), -1.0)
        if me in (1, 3):
            # same two processes, same tag, same size as halotile's message; in flight until after it
            peer = 4 - me
            flying = [dist.isend(torch.full((8,), 100.0 * me + i), peer), dist.irecv(theirs, peer)]
        summed = dist.all_reduce(count := torch.ones(3) * i, async_op=True)
        if me in (1, 3):
            ranks = Ranks.of(group, 20)
            with Call(ranks) as call:
                call.meet({"round": str(i)})
                local = torch.arange(8.0) + 8 * ranks.rank + 1000 * i
                out = fetch_rows(local, 0, Extents((8, 8)), [Interval(0, 16)] * 2, ranks)
                with call.together("end"):
                    assert torch.equal(out, torch.arange(16.0) + 1000 * i)
                assert ranks.transport.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        dist.barrier()
        summed.wait()
        for work in flying:
            work.wait()
        assert count.tolist() == [4.0 * i] * 3
        assert me in (0, 2) or (theirs == 100.0 * (4 - me) + i).all()
    return True


def test_a_groups_traffic_never_mixes_with_the_worlds():
    """S1."""
    assert run_world(_beside_the_world, timeout=60) == [True] * 4
