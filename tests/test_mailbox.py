"""The mailbox between processes: the same bits, nothing stale, nothing left, and no wait for a process that is gone."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.multiprocessing as mp

from halotile.comm import Mailbox
from halotile.comm.parcel import Parcel
from halotile.errors import MissingRankError, PlanError, UnsupportedError

pytestmark = pytest.mark.timeout(60)
TILE = (1, 3, 16, 16)


def tile_of(rank: int, index: int) -> torch.Tensor:
    return torch.full(TILE, float(1000 * rank + index))


def produce(box: Mailbox, rank: int, tiles: int, then: str, files: int | None = None) -> None:
    """What a spawned producer does: send its tiles, then end in its way."""
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    out = box.producer(rank)
    for index in range(tiles):
        out.send(0, index, tile_of(rank, index))
    if then == "close":
        out.close()
    elif then == "stay":
        time.sleep(60)
    os._exit(0)


def take_and_keep(box: Mailbox, tiles: int, files: int) -> None:
    """A consumer that holds all tiles at once, with few open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with box.consumer([1]) as inbox:
        # the producer is ahead by as much as it may
        time.sleep(1)
        kept = [inbox.receive(0) for _ in range(tiles)]
    assert [index for _, index, _ in kept] == list(range(tiles))
    assert all(torch.equal(tile, tile_of(1, index)) for _, index, tile in kept)


@contextmanager
def spawned(target, *arguments) -> Iterator[mp.Process]:
    process = mp.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_maps() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:halotile" in line for line in maps)


AWKWARD = {
    "float32": torch.randn(2, 3, 4, 5),
    "bfloat16": torch.randn(2, 3, 4, 5).to(torch.bfloat16),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
    "permuted": torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": torch.randn(2, 3, 4, 5)[:, :, ::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "empty": torch.empty(3, 0, 5),
    "scalar": torch.tensor(3, dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "needs gradients": torch.randn(3, requires_grad=True),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().resolve_conj(), b.detach().resolve_conj()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
    )


@pytest.mark.parametrize("name", AWKWARD)
def test_a_tensor_arrives_with_its_bits_dtype_and_layout(name: str) -> None:
    sent = AWKWARD[name]
    box = Mailbox(timeout_s=5)
    with box.consumer([3]) as inbox, box.producer(3) as out:
        out.send(7, 4, sent)
        rank, index, got = inbox.receive(7)
    assert (rank, index) == (3, 4)
    assert same_bits(got, sent)
    # the order of dims in memory, which what follows rounds by
    assert got.stride() == torch.empty_like(sent, device="meta").stride()


def test_several_tensors_are_one_message_and_one_buffer() -> None:
    box = Mailbox(timeout_s=5)
    with box.consumer([0]) as inbox, box.producer(0) as out:
        before = shared_maps()
        out.send(0, 1, list(AWKWARD.values()))
        _, _, got = inbox.receive(0)
        assert shared_maps() == before + 1
    assert isinstance(got, tuple)
    assert all(same_bits(a, b) for a, b in zip(got, AWKWARD.values(), strict=True))


def test_what_was_sent_may_be_changed_at_once() -> None:
    box = Mailbox(timeout_s=5)
    tile = tile_of(1, 1)
    with box.consumer([1]) as inbox, box.producer(1) as out:
        out.send(0, 1, tile)
        tile.zero_()
        assert torch.equal(inbox.receive(0)[2], tile_of(1, 1))


def test_nothing_of_an_earlier_job_enters_and_nothing_of_a_later_one_is_lost() -> None:
    box = Mailbox(timeout_s=5, in_flight=8)
    with box.consumer([1, 2]) as inbox, box.producer(1) as one, box.producer(2) as two:
        for index in range(3):
            one.send(4, index, tile_of(1, index))
        one.send(6, 60, tile_of(1, 60))
        two.send(5, 50, tile_of(2, 50))
        one.send(5, 51, tile_of(1, 51))
        assert sorted(inbox.receive(5)[:2] for _ in range(2)) == [(1, 51), (2, 50)]
        assert inbox.receive(6)[:2] == (1, 60)
        with pytest.raises(PlanError, match="job 5 comes after job 6"):
            inbox.receive(5)


def test_a_producer_waits_when_much_is_on_its_way() -> None:
    box = Mailbox(timeout_s=0.3, in_flight=3)
    with box.consumer([1]) as inbox, box.producer(1) as out:
        for index in range(3):
            out.send(0, index, tile_of(1, index))
        with pytest.raises(MissingRankError, match=r"rank 1 waited 0\.3 s .* not taken 3 of its messages"):
            out.send(0, 3, tile_of(1, 3))
        inbox.receive(0)
        out.send(0, 3, tile_of(1, 3))


def test_what_is_dropped_makes_room() -> None:
    box = Mailbox(timeout_s=1, in_flight=2)
    with box.consumer([1]) as inbox, box.producer(1) as out:
        for index in range(2):
            out.send(0, index, tile_of(1, index))
        with pytest.raises(MissingRankError, match="rank 1 is silent"):
            inbox.receive(1)
        for index in range(2):
            out.send(1, index, tile_of(1, index))
        assert inbox.receive(1)[:2] == (1, 0)


def test_who_is_missing_is_named_in_time() -> None:
    box = Mailbox(timeout_s=0.3)
    with box.consumer([1, 2]) as inbox, box.producer(1):
        with pytest.raises(MissingRankError, match=r"0\.3 s in job 9 .* rank 1 is silent, rank 2 never came"):
            inbox.receive(9)
        with pytest.raises(MissingRankError, match=r"mailbox: rank 2 never came"):
            inbox.receive(9, owing=[2])


def test_a_producer_without_consumer_says_so() -> None:
    with pytest.raises(MissingRankError, match=r"waited 0\.2 s for the consumer"):
        Mailbox(timeout_s=0.2).producer(1)
    box = Mailbox(timeout_s=5)
    inbox = box.consumer([1])
    out = box.producer(1)
    with pytest.raises(UnsupportedError, match="has a consumer already"):
        box.consumer([1])
    inbox.close()
    with pytest.raises(MissingRankError, match="the consumer of rank 1's mailbox has ended"):
        out.send(0, 0, tile_of(1, 0))
    out.close()


def test_a_check_ends_the_wait_of_both_ends() -> None:
    class Failed(Exception):
        pass

    def check() -> None:
        raise Failed

    box = Mailbox(timeout_s=30, in_flight=1)
    with box.consumer([1]) as inbox, box.producer(1) as out:
        with pytest.raises(Failed):
            inbox.receive(0, check=check)
        out.send(0, 0, tile_of(1, 0))
        with pytest.raises(Failed):
            out.send(0, 1, tile_of(1, 1), check=check)


def test_a_stranger_is_not_listened_to() -> None:
    box = Mailbox(timeout_s=0.3)
    with box.consumer([1]) as inbox, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(box._address)
        hello = b"0" * 16 + b"1"
        stranger.sendall(len(hello).to_bytes(4, "big") + hello + b"+" + pickle.dumps("anything"))
        with pytest.raises(MissingRankError, match="rank 1 never came"):
            inbox.receive(0)


def test_nothing_stays_open_or_mapped() -> None:
    box = Mailbox(timeout_s=5)
    files, maps = open_files(), shared_maps()
    with box.consumer([1]) as inbox, box.producer(1) as out:
        for index in range(50):
            out.send(0, index, [tile_of(1, index), tile_of(2, index)])
            letter = inbox.receive(0)
        during = open_files()
        assert shared_maps() == maps + 1
    del letter
    assert during - files <= 4
    assert (open_files(), shared_maps()) == (files, maps)


@pytest.mark.parametrize(("numbers", "match"), [({"timeout_s": 0}, "timeout_s=0"), ({"in_flight": 0}, "in_flight=0")])
def test_numbers_that_cannot_be(numbers, match) -> None:
    with pytest.raises(PlanError, match=match):
        Mailbox(**numbers)


def test_two_processes_send_at_the_same_time() -> None:
    box, tiles = Mailbox(timeout_s=30, in_flight=2), 40
    with (
        spawned(produce, box, 1, tiles, "close"),
        spawned(produce, box, 2, tiles, "close"),
        box.consumer([1, 2]) as inbox,
    ):
        got = [inbox.receive(0) for _ in range(2 * tiles)]
        assert sorted(letter[:2] for letter in got) == [(rank, i) for rank in (1, 2) for i in range(tiles)]
        # of one rank they come in its order
        assert [index for rank, index, _ in got if rank == 1] == list(range(tiles))
        assert all(torch.equal(tile, tile_of(rank, index)) for rank, index, tile in got)
        with pytest.raises(MissingRankError, match="rank 1 has closed its end, rank 2 has closed its end"):
            inbox.receive(0)


def test_a_worker_that_ends_right_after_it_put_its_tile() -> None:
    """Case X1. The tiles arrive; who wants more is told at once which rank ended."""
    box = Mailbox(timeout_s=30)
    with box.consumer([1]) as inbox, spawned(produce, box, 1, 3, "end") as worker:
        kept = [inbox.receive(0)]
        worker.join(30)
        kept += [inbox.receive(0), inbox.receive(0)]
        assert all(torch.equal(tile, tile_of(1, index)) for _, index, tile in kept)
        began = time.monotonic()
        with pytest.raises(MissingRankError, match="rank 1 ended in the midst of its work"):
            inbox.receive(0)
        assert time.monotonic() - began < 5


def test_a_worker_that_is_killed_in_the_midst_of_a_job() -> None:
    box = Mailbox(timeout_s=30)
    with (
        box.consumer([1, 2]) as inbox,
        spawned(produce, box, 1, 1, "stay") as worker,
        box.producer(2) as other,
    ):
        assert inbox.receive(0)[:2] == (1, 0)
        os.kill(worker.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(MissingRankError, match="rank 1 ended in the midst of its work"):
            inbox.receive(0)
        assert time.monotonic() - began < 5
        # the others are not touched by it
        other.send(0, 0, tile_of(2, 0))
        assert inbox.receive(0, owing=[2])[0] == 2


def test_two_hundred_tiles_with_a_hundred_open_files() -> None:
    """Case X2, on both sides: a hundred on their way at once, and all two hundred held by the consumer."""
    box = Mailbox(timeout_s=30, in_flight=100)
    with spawned(take_and_keep, box, 200, 100) as consumer, spawned(produce, box, 1, 200, "close", 100) as producer:
        producer.join(50)
        consumer.join(50)
        assert (producer.exitcode, consumer.exitcode) == (0, 0)


def test_more_on_its_way_than_the_system_holds_is_an_error_not_a_hang() -> None:
    box = Mailbox(timeout_s=1, in_flight=100_000)
    with box.consumer([1]), box.producer(1) as out:
        ended = threading.Event()

        def send() -> None:
            try:
                for index in range(100_000):
                    out.send(0, index, torch.empty(0))
            except MissingRankError:
                ended.set()

        thread = threading.Thread(target=send)
        thread.start()
        thread.join(30)
        assert ended.is_set()


def test_a_user_whose_descriptors_are_all_on_their_way_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, send_fds = [1, 2, 3], socket.send_fds

    def reluctant(*arguments):
        if refused:
            raise OSError(refused.pop() and errno.ETOOMANYREFS, "too many references")
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", reluctant)
    box = Mailbox(timeout_s=5)
    with box.consumer([1]) as inbox, box.producer(1) as out:
        out.send(0, 1, tile_of(1, 1))
        assert torch.equal(inbox.receive(0)[2], tile_of(1, 1))
    assert not refused


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_a_tensor_may_be_changed_once_it_is_sent(device: str) -> None:
    box = Mailbox(timeout_s=30)
    with box.consumer([1]) as inbox, spawned(produce_on, box, 1, device):
        for index in range(20):
            _, got, (tile, empty) = inbox.receive(0)
            assert (got, tile.device.type, empty.device.type) == (index, device, device)
            assert torch.equal(tile.cpu(), tile_of(1, index).to(torch.bfloat16))


def produce_on(box: Mailbox, rank: int, device: str) -> None:
    with box.producer(rank) as out:
        for index in range(20):
            tile = tile_of(rank, index).to(device, torch.bfloat16)
            out.send(0, index, [tile, tile[:0]])
            tile.zero_()


def test_whoever_has_all_it_wanted_may_be_gone_before_send_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = mp.get_context("spawn").Pipe()
    sent = socket.send_fds

    def send_to_one_that_leaves(*given):
        size = sent(*given)
        theirs.close()
        return size

    monkeypatch.setattr(socket, "send_fds", send_to_one_that_leaves)
    with Parcel("header", [torch.ones(3)]) as parcel:
        parcel.send(ours)
    assert theirs.closed
