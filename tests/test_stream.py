"""`stream`: batches of frames as soon as their tiles are there, on real ranks and on virtual ones."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import test_grid as grid
import tiny_vaes as tiny
import torch
import torch.multiprocessing as mp
from ranks import run_ranks

import halotile
from halotile import (
    DimensionTilingConfig,
    LostGroupError,
    MembershipError,
    MissingRankError,
    PlanError,
    Ranks,
    RemoteRankError,
    TileCountConfig,
)
from halotile.comm import Mailbox, run_virtual
from halotile.decode.placement import device_of, place_note, split_note

D = DimensionTilingConfig
LTX2, KL = grid.LTX2, grid.KL
FOUR = TileCountConfig(frames=D(4, 1), height=D(2, 2))


def _z(batch: int = 1) -> torch.Tensor:
    return grid.latents(batch=batch, frames=5, height=6, width=4)


def _stream(vae, z, group, tiling=FOUR, **options):
    with torch.no_grad():
        return halotile.stream(vae, z, group, tiling=tiling, **options)


def _whole(tiling=FOUR, z=None, name=LTX2) -> torch.Tensor:
    return grid.alone(name, tiling, _z() if z is None else z)


# --- the batches together are the decode, bit for bit


def _every_grid(group):
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    vae, out = tiny.build(LTX2), {}
    for slow, (name, tiling) in enumerate(grid.GRIDS.items()):
        late = rank == slow % size
        hook = vae.decoder.register_forward_pre_hook(lambda module, args, late=late: time.sleep(0.05 * late))
        batches = list(_stream(vae, grid.latents(), group, tiling, driver=slow % size))
        hook.remove()
        if rank == slow % size:
            assert len(batches) == tiling.frames.num_tiles
            out[name] = grid.digest(torch.cat(batches, 2))
        else:
            assert batches == []
    return out


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return {name: grid.digest(grid.alone(LTX2, tiling)) for name, tiling in grid.GRIDS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_batches_together_are_the_decode_for_every_number_of_ranks(ranks: int, expected) -> None:
    made: dict[str, str] = {}
    for of_rank in run_ranks(_every_grid, ranks):
        made |= of_rank
    assert made == expected


def _trained(group):
    vae, z = grid.trained()
    batches = list(_stream(vae, z, group, TileCountConfig(D(2, 1), D(2, 2), D(1, 0))))
    return grid.digest(torch.cat(batches, 2)) if batches else None


def test_the_trained_clip_model_streams_what_it_decodes() -> None:
    vae, z = grid.trained()
    whole = grid.digest(grid.decode(vae, z, TileCountConfig(D(2, 1), D(2, 2), D(1, 0)), Ranks.alone()))
    assert run_ranks(_trained, 2) == [whole, None]


def _variant(group, how):
    vae, z, options = tiny.build(LTX2), _z(), {}
    if how == "batch of 2":
        z = _z(batch=2)
    elif how == "bfloat16":
        vae, z = vae.to(torch.bfloat16), z.bfloat16()
    elif how == "round robin":
        options = {"scheduler": "round_robin"}
    elif how == "contiguous":
        options = {"scheduler": "contiguous"}
    if how == "inference mode":
        with torch.inference_mode():
            batches = list(halotile.stream(vae, z, group, tiling=FOUR, driver=1))
    else:
        batches = list(_stream(vae, z, group, driver=1, **options))
    whole = grid.decode(vae, z, FOUR, group)
    assert all(batch.dtype == z.dtype for batch in batches)
    return bool(batches) and torch.equal(torch.cat(batches, 2), whole)


@pytest.mark.parametrize("how", ["batch of 2", "bfloat16", "round robin", "contiguous", "inference mode"])
def test_variants_in_a_group_without_the_first_global_rank(how: str) -> None:
    assert run_ranks(_variant, 3, how, members=(1, 2, 3)) == [False, True, False]


def _autocast_stream(group):
    with torch.autocast("cpu", torch.bfloat16):
        batches = _stream(tiny.build(LTX2), _z(), group)
    made = list(batches)
    return grid.digest(torch.cat(made, 2)) if made else None


def test_batches_are_made_under_the_autocast_of_the_call() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        whole = grid.digest(grid.decode(tiny.build(LTX2), _z(), FOUR, Ranks.alone()))
    assert whole != grid.digest(_whole())
    assert run_ranks(_autocast_stream, 2) == [whole, None]


def _picture(group):
    vae, z = tiny.build(KL), grid.latents(KL)
    tiling = TileCountConfig(height=D(3, 2))
    batches = list(_stream(vae, z, group, tiling))
    whole = grid.decode(vae, z, tiling, group)
    return len(batches), not batches or torch.equal(batches[0], whole)


def test_the_caller_may_change_its_latents_while_it_reads() -> None:
    z, batches = _z(), []
    for batch in _stream(tiny.build(LTX2), z, Ranks.alone()):
        batches.append(batch)
        z.zero_()
    assert torch.equal(torch.cat(batches, 2), _whole())


def test_a_picture_is_one_batch() -> None:
    assert run_ranks(_picture, 2) == [(1, True), (0, True)]


def test_on_many_virtual_ranks() -> None:
    z, whole = _z(), _whole()
    # random weights come from a generator that threads share
    vaes = [tiny.build(LTX2) for _ in range(7)]

    def work(transport):
        return list(_stream(vaes[transport.rank], z, Ranks(transport), driver=5))

    results = run_virtual(7, work)
    assert torch.equal(torch.cat(results[5], 2), whole)
    assert all(batches == [] for rank, batches in enumerate(results) if rank != 5)


def test_device_fn_places_each_batch() -> None:
    batches = _stream(tiny.build(LTX2), _z(), Ranks.alone(), device_fn=lambda batch: ["cpu", "meta"][batch % 2])
    assert [batch.device.type for batch in batches] == ["cpu", "meta", "cpu", "meta"]


# --- order of events


def _events(group):
    """Rank 1 waits before its last tile until the driver has its first batch."""
    rank = torch.distributed.get_rank(group)
    store = torch.distributed.distributed_c10d._get_default_store()
    vae, made = tiny.build(LTX2), []

    def hold(module, args):
        made.append(len(made))
        if rank == 1 and len(made) == 4:
            store.wait(["first batch"])

    vae.decoder.register_forward_pre_hook(hold)
    out = []
    for batch in _stream(vae, _z(), group):
        out.append(batch)
        if len(out) == 1:
            assert len(made) < 4
            store.set("first batch", b"yielded")
    torch.distributed.barrier(group)
    if rank == 0:
        store.delete_key("first batch")
    return len(made), grid.digest(torch.cat(out, 2)) if out else None


def test_the_first_batch_is_there_before_the_last_tile_is_decoded() -> None:
    assert run_ranks(_events, 2) == [(4, grid.digest(_whole())), (4, None)]


def _lazy(group):
    """The others finish and go on while the driver has not asked for anything yet."""
    rank = torch.distributed.get_rank(group)
    vae, calls = tiny.build(LTX2), []
    vae.decoder.register_forward_pre_hook(lambda module, args: calls.append(1))
    batches = _stream(vae, _z(), group)
    before = len(calls)
    torch.distributed.barrier(group)
    listed = list(batches) if rank else []
    torch.distributed.barrier(group)
    return before, listed, grid.digest(torch.cat(list(batches), 2)) if rank == 0 else None


def test_the_others_never_wait_for_a_driver_that_does_not_iterate() -> None:
    results = run_ranks(_lazy, 3)
    assert results[0][0] == 0
    assert results[1][0] + results[2][0] > 0
    assert results[1][1] == results[2][1] == []
    assert results[0][2] == grid.digest(_whole())


def _held(group):
    """What the driver holds at most: tiles of the batch that is asked for, and frames that are open."""
    batches = _stream(tiny.build(LTX2), _z(), group, TileCountConfig(frames=D(4, 1), height=D(2, 2)))
    if torch.distributed.get_rank(group):
        return None
    most = 0
    for batch in batches:
        assert not batches._tiles
        link = batches._link
        most = max(most, len(link._under_way))
        assert batches._blend._sum is None or batches._blend._sum.shape[2] <= 8, batch.shape
    return most


def test_the_driver_holds_no_tiles_between_batches() -> None:
    assert run_ranks(_held, 3)[0] == 0


def test_progress_counts_tiles_on_the_driver() -> None:
    seen = []
    list(_stream(tiny.build(LTX2), _z(), Ranks.alone(), progress=lambda done, total: seen.append((done, total))))
    assert seen == [(done, 8) for done in range(1, 9)]


def _report(group):
    batches = _stream(tiny.build(LTX2), _z(), group)
    early = batches.report
    list(batches)
    by_frames = _stream(tiny.build(LTX2), _z(), group, TileCountConfig(frames=D(4, 1)))
    list(by_frames)
    # the first tile is smaller than the others, and first all the same
    assert by_frames._plan.owners == (0, 1, 0, 1)
    return early is None, batches.report


def test_the_report_says_what_travelled() -> None:
    (open_yet, driver), (done_already, other) = run_ranks(_report, 2)
    assert open_yet
    assert not done_already
    assert (driver.strategy, driver.exactness, driver.tiles, driver.messages) == ("tile", "approximate", 8, 0)
    assert driver.loads == other.loads == (176, 176)
    assert other.messages == 4
    assert driver.to_dict()["reason"].startswith("stream: 4x2x1 tiles")


# --- left before the end


def _left(group, how):
    rank = torch.distributed.get_rank(group)
    vae = tiny.build(LTX2)
    slow = vae.decoder.register_forward_pre_hook(lambda module, args: time.sleep(0.1))
    batches = _stream(vae, _z(), group)
    if rank == 0:
        if how == "close":
            next(batches)
            batches.close()
            batches.close()
        elif how == "never begun":
            del batches
        elif how == "exception":

            def consume(batches):
                for _ in batches:
                    raise KeyError("consumer")

            with pytest.raises(KeyError):
                consume(batches)
            del batches
        elif how == "with":
            with batches:
                next(batches)
        gc.collect()
        if how in ("close", "with"):
            assert list(batches) == []
    slow.remove()
    again = list(_stream(vae, _z(), group, driver=1))
    return grid.digest(torch.cat(again, 2)) if rank == 1 else None, grid.digest(grid.decode(vae, _z(), FOUR, group))


@pytest.mark.parametrize("how", ["close", "never begun", "exception", "with"])
def test_an_iterator_that_is_left_leaves_the_group_usable(how: str) -> None:
    whole = grid.digest(_whole())
    assert run_ranks(_left, 2, how) == [(None, whole), (whole, whole)]


def test_an_iterator_that_is_left_stops_the_others_at_their_next_tile() -> None:
    def work(transport):
        vae, calls = tiny.build(LTX2), []

        def slowly(module, args):
            calls.append(1)
            time.sleep(0.3)

        vae.decoder.register_forward_pre_hook(slowly)
        _stream(vae, _z(), Ranks(transport)).close()
        return len(calls)

    driver, other = run_virtual(2, work)
    assert driver == 0
    # it has four tiles, and may see that it need not begin the first
    assert other <= 1


def _still_open(group):
    rank = torch.distributed.get_rank(group)
    vae, z = tiny.build(LTX2), _z()
    batches = _stream(vae, z, group)
    first = [next(batches)] if rank == 0 else []
    for again in (_stream, grid.decode):
        with pytest.raises(RemoteRankError if rank else PlanError, match=r"still open after batch 1 of 4; iterate"):
            again(vae, z, *((group,) if again is _stream else (FOUR, group)))
    rest = first + list(batches)
    return grid.digest(torch.cat(rest, 2)) if rest else None, grid.digest(grid.decode(vae, z, FOUR, group))


def test_the_next_call_of_the_group_waits_for_the_end_of_the_stream() -> None:
    whole = grid.digest(_whole())
    assert run_ranks(_still_open, 2) == [(whole, whole), (None, whole)]


# --- fail together


class _BrokenTileError(Exception):
    pass


def _broken(group, where):
    rank = torch.distributed.get_rank(group)
    vae, tile = tiny.build(LTX2), []

    def fail(module, args):
        tile.append(1)
        if rank == where and len(tile) == 2:
            # by then the others are done
            time.sleep(1)
            raise _BrokenTileError("the tile is broken")

    hook = vae.decoder.register_forward_pre_hook(fail)
    failed = pytest.raises(RemoteRankError, match=f"rank {where} failed with _BrokenTileError: the tile is broken")
    started = time.monotonic()
    if rank and where:
        # those that do not drive wait for each other
        with failed:
            _stream(vae, _z(), group, scheduler="round_robin")
    else:
        batches = _stream(vae, _z(), group, scheduler="round_robin")
        if rank:
            time.sleep(3)
        with failed:
            list(batches)
    assert time.monotonic() - started < 30
    hook.remove()
    return grid.digest(grid.decode(vae, _z(), FOUR, group))


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_tile_that_raises_makes_all_ranks_raise_and_the_group_stays_usable(where: int) -> None:
    assert run_ranks(_broken, 3, where) == [grid.digest(_whole())] * 3


def _silent(group):
    """Rank 1 takes longer over a tile than the driver has patience for."""
    rank = torch.distributed.get_rank(group)
    vae, z = tiny.build(LTX2), _z()
    hook = vae.decoder.register_forward_pre_hook(lambda module, args: time.sleep(3) if rank == 1 else None)
    started = time.monotonic()
    with pytest.raises(MissingRankError, match=r"waited 1 s in call \d+ for tiles of ranks 1 \(global rank 1\)"):
        list(_stream(vae, z, group, timeout_s=1))
    assert time.monotonic() - started < 20
    hook.remove()
    torch.distributed.barrier(group)
    return grid.digest(grid.decode(vae, z, FOUR, group))


def test_a_rank_that_makes_no_progress_is_named() -> None:
    assert run_ranks(_silent, 2) == [grid.digest(_whole())] * 2


def _wrong(group):
    vae, z = tiny.build(LTX2), _z()
    rank = torch.distributed.get_rank(group)
    with pytest.raises(MembershipError, match="driver=7 is not a rank of this group of 2"):
        _stream(vae, z, group, driver=7)
    with pytest.raises(PlanError, match="stream needs a tiling"):
        _stream(tiny.build("AutoencoderKLMochi"), z, group, None)
    with pytest.raises(halotile.MismatchError, match="driver: rank 0 has 0, rank 1 has 1"):
        _stream(vae, z, group, driver=rank)
    with pytest.raises(RemoteRankError if rank else PlanError, match="height, 6 latents: 9 tiles"):
        _stream(vae, z, group, FOUR if rank else TileCountConfig(height=D(9, 0)))
    return grid.digest(grid.decode(vae, z, FOUR, group))


def _killed(rank: int, folder: str, box: Mailbox | None) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    vae, made = tiny.build(LTX2), []
    if rank == 2:
        # after its first tile
        vae.decoder.register_forward_hook(lambda *_: made.append(1) if not made else os.kill(os.getpid(), 9))
    try:
        list(_stream(vae, _z(), None, timeout_s=3, mailbox=box))
    except MissingRankError as error:
        (Path(folder) / f"said{rank}").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("carrier", ["group", "mailbox"])
def test_a_rank_that_is_killed_is_missed_by_all_others(carrier: str, tmp_path: Path) -> None:
    box = Mailbox(3.0) if carrier == "mailbox" else None
    started = time.monotonic()
    # forks of the server that ranks.py has, which need not import torch
    mp.start_processes(_killed, (str(tmp_path), box), nprocs=3, join=False, start_method="forkserver")
    said = [tmp_path / "said0", tmp_path / "said1"]
    while time.monotonic() < started + 60 and not all(path.exists() and path.read_text() for path in said):
        time.sleep(0.1)
    assert all("2" in path.read_text() for path in said)


def test_what_cannot_be_is_refused_on_every_rank_and_the_next_call_works() -> None:
    assert run_ranks(_wrong, 2) == [grid.digest(_whole())] * 2


def _program(_, rank, store):
    """As in a script: the others fall out of their loop at once, give the group up and end."""
    torch.set_num_threads(1)
    # what the memory of this machine carries is there when it is sent
    os.environ["HALOTILE_HOST_LINKS"] = "0"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    batches, over = _stream(tiny.build(LTX2), _z(), None, timeout_s=60), Path(f"{store}.over")
    while rank == 0 and not over.exists():
        time.sleep(0.05)
    # what the interpreter takes to end when nothing holds it
    time.sleep(0 if rank else 1)
    made = list(batches)
    if rank == 0:
        torch.save(torch.cat(made, 2), f"{store}.pt")
    over.touch()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_rank_whose_program_ends_stays_until_the_driver_has_its_tiles(tmp_path, start) -> None:
    store = str(tmp_path / "store")
    # a fork leaves out some of what Python does when a program ends
    other = mp.start_processes(_program, (1, store), nprocs=1, join=False, start_method=start)
    mp.start_processes(_program, (0, store), nprocs=1, start_method="forkserver")
    assert other is not None
    assert other.join()
    assert torch.equal(torch.load(tmp_path / "store.pt"), _whole())


def test_a_lost_group_says_so() -> None:
    def work(transport):
        transport.abort("in the test")
        with pytest.raises(LostGroupError):
            _stream(tiny.build(LTX2), _z(), Ranks(transport))

    run_virtual(1, work)


# --- where batches go, and what ranks are given


def test_round_robin_takes_the_devices_of_the_drivers_machine() -> None:
    notes = [b"a cuda:0\nx", b"a cuda:1\ny", b"b cuda:0\n", b"a cuda:1\n\n"]
    at = device_of("round_robin", notes, 1)
    assert at is not None
    assert [at(batch) for batch in range(3)] == ["cuda:1", "cuda:0", "cuda:1"]
    elsewhere = device_of("round_robin", notes, 2)
    assert elsewhere is not None
    assert elsewhere(5) == "cuda:0"
    assert split_note(place_note(torch.device("cuda", 3)) + b"1\n2")[1:] == ("cuda:3", b"1\n2")


def test_round_robin_through_a_stream() -> None:
    batches = _stream(tiny.build(LTX2), _z(), Ranks.alone(), device_fn="round_robin")
    assert [batch.device.type for batch in batches] == ["cpu"] * 4
    with pytest.raises(halotile.PlanError, match="device_fn='spread'"):
        _stream(tiny.build(LTX2), _z(), Ranks.alone(), device_fn="spread")


def _other_arguments(group):
    """Rank 1 has a timestep of another shape, in a stream and in a decode."""
    vae, z = tiny.build(LTX2), _z()
    temb = torch.full((1 + torch.distributed.get_rank(group),), 0.05)
    calls = (lambda: _stream(vae, z, group, temb=temb), lambda: halotile.decode(vae, z, group, "shard", temb=temb))
    errors = []
    for call in calls:
        with pytest.raises(halotile.MismatchError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_ranks_with_other_arguments_do_not_start() -> None:
    for errors in run_ranks(_other_arguments, 2):
        for error in errors:
            assert "arguments: rank 0 has temb=torch.float32[1], rank 1 has temb=torch.float32[2]" in error
