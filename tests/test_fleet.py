"""A fleet as programs use it: real workers, killed and interrupted ones too, from scripts and from a notebook."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tiled
import tiny_vaes
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

import halotile
from halotile import Fleet, TileCountConfig
from halotile.errors import (
    BusyError,
    GradientError,
    LostGroupError,
    MissingRankError,
    PlanError,
    RemoteRankError,
    UnsupportedError,
)
from halotile.planning.tilings import DimensionTilingConfig

pytestmark = pytest.mark.timeout(120)
NAME = "AutoencoderKLLTX2Video"
THREE_BATCHES = TileCountConfig(frames=DimensionTilingConfig(3, 1))
# latents of such a value are orders to the decoder of these tests
RANK_1_FAILS, ALL_FAIL, RANK_1_DIES, SLOW, DRAWS = 1001.0, 1002.0, 1003.0, 1004.0, 1005.0


def obedient_vae() -> torch.nn.Module:
    """The tiny LTX2 VAE, tiling on, whose decoder does what its latents say."""
    vae = tiled.build_tiled(NAME)
    vae.decoder.register_forward_pre_hook(_obey)
    return vae


def _obey(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    z = arguments[0]
    if isinstance(z, FakeTensor) or z.device.type == "meta":
        return None
    order, rank = float(z.flatten()[0]), dist.get_rank() if dist.is_initialized() else 0
    if order == ALL_FAIL or (order == RANK_1_FAILS and rank == 1):
        raise ValueError(f"ordered to fail on rank {rank}")
    if order == RANK_1_DIES and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == SLOW:
        time.sleep(0.3)
    if order == DRAWS:
        return (torch.randn(z.shape), *arguments[1:])
    return None


def latents(order: float | None = None, frames: int = 2, side: int = 7) -> torch.Tensor:
    shape = (1, 8, frames, side, side)
    if order is not None:
        return torch.full(shape, order)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def one_rank(half: str, x: torch.Tensor, tiling: bool = True) -> torch.Tensor:
    """What one rank makes of it by itself."""
    vae = tiled.build_tiled(NAME)
    if not tiling:
        vae.disable_tiling()
    with torch.no_grad():
        return tiny_vaes.encode(vae, NAME, x) if half == "encode" else vae.decode(x).sample


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(obedient_vae, ranks=2, threads=1) as made:
        yield made
    assert not alive(made.pids)


def alive(pids: tuple[int, ...]) -> list[int]:
    """Those that run: a process that has ended may still be listed until its parent has asked for it."""
    running = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            running += [pid] if state != "Z" else []
    return running


def assert_ends(pids: tuple[int, ...], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)


def test_the_bits_are_those_of_one_rank(fleet: Fleet) -> None:
    for half, make in (("decode", latents), ("encode", lambda: tiled.tiled_input(NAME, "encode"))):
        x = make()
        got = getattr(fleet, half)(x, strategy="tile")
        expected = one_rank(half, x)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
        assert fleet.report is not None
        assert (fleet.report.half, fleet.report.strategy, fleet.report.ranks) == (half, "tile", 2)
        assert all(fleet.report.loads)
    half_precision = fleet.decode(latents().to(torch.bfloat16), strategy="tile")
    assert half_precision.dtype == torch.bfloat16
    assert torch.equal(half_precision, one_rank("decode", latents().to(torch.bfloat16).float()).to(torch.bfloat16))
    assert not dist.is_initialized()


def test_a_sharded_decode_is_the_untiled_one_to_rounding(fleet: Fleet) -> None:
    got, expected = fleet.decode(latents(), strategy="shard"), one_rank("decode", latents(), tiling=False)
    # float32, another order of sums: the tolerance of `verify`
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert fleet.report is not None
    assert fleet.report.exactness == "allclose"


def test_a_stream_is_the_decode_with_its_grid(fleet: Fleet) -> None:
    x = latents(frames=6, side=4)
    whole = fleet.decode(x, strategy="tile", tiling=THREE_BATCHES)
    seen: list[tuple[int, int]] = []
    batches = list(fleet.stream(x, tiling=THREE_BATCHES, progress=lambda done, total: seen.append((done, total))))
    assert len(batches) == 3
    assert torch.equal(torch.cat(batches, 2), whole)
    assert fleet.report is not None
    assert fleet.report.reason.startswith("stream")
    assert seen == [(1, 3), (2, 3), (3, 3)]
    # each batch keeps its own memory
    assert len({batch.untyped_storage().data_ptr() for batch in batches}) == 3


def test_random_numbers_are_the_programs_own(fleet: Fleet) -> None:
    torch.manual_seed(3)
    first, second = (fleet.decode(latents(DRAWS), strategy="serial") for _ in range(2))
    after = torch.rand(1)
    torch.manual_seed(3)
    vae = obedient_vae()
    torch.manual_seed(3)
    with torch.no_grad():
        expected = [vae.decode(latents(DRAWS)).sample for _ in range(2)]
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    assert torch.equal(after, torch.rand(1))


def held_by(pid: int | str) -> tuple[int, int, int]:
    """Open files, pieces of shared memory and threads of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    shared = sum("memfd:halotile" in line or "/dev/shm" in line for line in maps.splitlines())
    return len(os.listdir(f"/proc/{pid}/fd")), shared, len(os.listdir(f"/proc/{pid}/task"))


def children(pid: int) -> set[int]:
    return {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }


def test_twenty_jobs_in_a_row_leave_nothing_behind(fleet: Fleet) -> None:
    x, orders = latents(frames=4, side=4), latents(ALL_FAIL, side=4)

    def jobs(times: int) -> list[object]:
        for number in range(times):
            list(fleet.stream(x, tiling=THREE_BATCHES))
            fleet.decode(x, strategy=("tile", "shard")[number % 2])
            with pytest.raises(RemoteRankError):
                fleet.decode(orders, strategy="tile")
            next(fleet.stream(x, tiling=THREE_BATCHES))
        gc.collect()
        fleet.decode(x, strategy="tile")
        return settled()

    def settled() -> list[object]:
        """What is held once it stays the same: connections close a moment after their job."""
        seen: list[object] = []
        for _ in range(20):
            time.sleep(0.3)
            now = held()
            if now == seen:
                break
            seen = now
        return seen

    def held() -> list[object]:
        named = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in (os.getpid(), *fleet.pids))]
        processes = [children(pid) for pid in (os.getpid(), *fleet.pids)]
        return [held_by("self"), [held_by(pid) for pid in fleet.pids], processes, named]

    # what kernels and the first use of each path keep is there after two
    before = jobs(2)
    assert jobs(5) == before


def test_what_all_ranks_refuse_comes_back_as_it_is(fleet: Fleet) -> None:
    with pytest.raises(PlanError, match="zigzag") as caught:
        fleet.decode(latents(), strategy="zigzag")
    assert "in the worker of rank" in str(caught.value.__cause__)
    assert "options.py" in str(caught.value.__cause__)
    assert torch.equal(fleet.decode(latents(), strategy="tile"), one_rank("decode", latents()))


@pytest.mark.parametrize("order", [RANK_1_FAILS, ALL_FAIL])
def test_an_error_in_the_work_comes_back_with_its_traceback(fleet: Fleet, order: float) -> None:
    pids = fleet.pids
    with pytest.raises(RemoteRankError, match="ValueError: ordered to fail on rank") as caught:
        fleet.decode(latents(order), strategy="tile")
    assert caught.value.rank == (1 if order == RANK_1_FAILS else caught.value.rank)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in _obey" in shown
    assert f"ordered to fail on rank {caught.value.rank}" in shown
    # the group is usable, so the fleet goes on with the same workers
    assert torch.equal(fleet.decode(latents(), strategy="tile"), one_rank("decode", latents()))
    assert fleet.pids == pids
    with pytest.raises(RemoteRankError, match="ordered to fail"):
        list(fleet.stream(latents(order, frames=6, side=4), tiling=THREE_BATCHES))
    assert len(list(fleet.stream(latents(frames=6, side=4), tiling=THREE_BATCHES))) == 3


def test_a_job_that_cannot_be_packed_changes_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", full)
        with pytest.raises(OSError, match="too many open files"):
            fleet.decode(latents(), strategy="tile")
    assert fleet.decode(latents(), strategy="tile").isfinite().all()


class FailsToArriveOnRank1:
    def __reduce__(self) -> tuple[Callable, tuple[()]]:
        return _arrive, ()


def _arrive() -> None:
    if dist.get_rank() == 1:
        raise OSError("this rank lacks a file")


def test_a_rank_that_fails_before_its_call_holds_nobody_up(fleet: Fleet) -> None:
    with pytest.raises(RemoteRankError, match="rank 1 failed with OSError: this rank lacks a file"):
        fleet.decode(latents(), strategy="tile", return_dict=FailsToArriveOnRank1())
    assert fleet.decode(latents(), strategy="tile").isfinite().all()


def test_an_argument_that_the_vae_does_not_take(fleet: Fleet) -> None:
    with pytest.raises(RemoteRankError, match="unexpected keyword argument 'zigzag'"):
        fleet.decode(latents(), strategy="tile", zigzag=1)
    with pytest.raises(UnsupportedError, match="does not pickle"):
        fleet.decode(latents(), strategy="tile", zigzag=lambda: 1)
    assert fleet.decode(latents(), strategy="tile").isfinite().all()


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (PlanError, "delivers to the program", lambda f: f.decode(latents(), deliver="all", driver=1)),
        (PlanError, "must be a torch.Tensor", lambda f: f.decode([1])),
        (PlanError, "B C H W", lambda f: f.encode(torch.zeros(3))),
        (PlanError, "not callable", lambda f: f.decode(latents(), progress=3)),
        (GradientError, "inference", lambda f: f.decode(latents().requires_grad_())),
    ],
)
def test_what_cannot_be_is_refused_here(fleet: Fleet, error: type[Exception], match: str, call: Callable) -> None:
    with pytest.raises(error, match=match):
        call(fleet)


def test_one_job_at_a_time(fleet: Fleet) -> None:
    errors: list[BaseException] = []
    seen: list[tuple[int, int]] = []

    def another(done: int, total: int) -> None:
        seen.append((done, total))
        with pytest.raises(BusyError, match="one at a time"):
            fleet.decode(latents())

    def elsewhere() -> None:
        try:
            fleet.decode(latents(SLOW), strategy="tile", progress=another)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    while not seen:
        time.sleep(0.01)
    with pytest.raises(BusyError, match="one at a time"):
        fleet.stream(latents(), tiling=THREE_BATCHES)
    thread.join(30)
    assert not errors
    assert seen[-1][0] == seen[-1][1]
    assert fleet.decode(latents(), strategy="tile").isfinite().all()


def test_a_stream_holds_the_fleet_until_it_is_left(fleet: Fleet) -> None:
    x, y = latents(frames=6, side=4), latents(side=4)
    alone = one_rank("decode", y)

    def works() -> None:
        assert torch.equal(fleet.decode(y, strategy="tile"), alone)

    stream = fleet.stream(x, tiling=THREE_BATCHES)
    next(stream)
    with pytest.raises(BusyError, match="close"):
        fleet.decode(latents())
    stream.close()
    assert list(stream) == []
    works()
    # never iterated
    del stream
    fleet.stream(x, tiling=THREE_BATCHES)
    works()
    for _ in fleet.stream(x, tiling=THREE_BATCHES):
        break
    works()

    def breaks_off() -> None:
        for _ in fleet.stream(x, tiling=THREE_BATCHES):
            raise KeyError

    with pytest.raises(KeyError):
        breaks_off()
    works()
    with fleet.stream(x, tiling=THREE_BATCHES) as stream:
        next(stream)
    works()
    # only the garbage collector finds this one
    ring = [fleet.stream(x, tiling=THREE_BATCHES)]
    ring.append(ring)
    del ring
    gc.collect()
    works()


def test_a_slow_reader_bounds_what_is_made_ahead(fleet: Fleet) -> None:
    seen = []
    tiling = TileCountConfig(frames=DimensionTilingConfig(6, 0))
    stream = fleet.stream(latents(frames=6, side=4), tiling=tiling, progress=lambda done, total: seen.append(done))
    next(stream)
    time.sleep(1)
    # one was taken, two wait, and one is held by rank 0 meanwhile
    next(stream)
    assert max(seen) <= 5
    assert len(list(stream)) == 4


def test_ctrl_c_gives_the_job_up(fleet: Fleet) -> None:
    pids, expected = fleet.pids, one_rank("decode", latents())
    interrupt = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    # 16 tiles, 0.3 s each
    with pytest.raises(KeyboardInterrupt):
        fleet.decode(latents(SLOW, side=15), strategy="tile")
    began = time.monotonic()
    assert torch.equal(fleet.decode(latents(), strategy="tile"), expected)
    # it stops at the next tile, not at the end
    assert time.monotonic() - began < 1.5
    assert fleet.pids == pids


def test_a_folder_and_what_it_is_loaded_in(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline" / "vae"
    vae = tiny_vaes.build("AutoencoderKL")
    vae.save_pretrained(folder)
    x = torch.randn(1, 4, 6, 6)
    with Fleet(str(folder), ranks=1, devices=["cpu"], dtype=torch.bfloat16, threads=1) as fleet, torch.no_grad():
        assert torch.equal(fleet.decode(x), vae.bfloat16().decode(x.bfloat16()).sample.float())
        files = held_by("self")[0]
        stream = fleet.stream(x, tiling=TileCountConfig(height=DimensionTilingConfig(2, 2)))
        fleet.close()
        # a clip that is cut short must not look finished
        with pytest.raises(LostGroupError, match="before the stream had come to its end"):
            next(stream)
        assert held_by("self")[0] == files - 1
        with pytest.raises(LostGroupError, match="closed"):
            fleet.decode(x)
    assert_ends(fleet.pids)


def test_a_fleet_that_is_closed_or_whose_worker_ends_between_jobs() -> None:
    x = torch.ones(1, 1, 4, 4)
    fleet = Fleet(partial(torch.nn.Upsample, scale_factor=2), ranks=1)
    first = fleet.pids
    fleet.close()
    assert_ends(first, within_s=0)
    fleet.restart()
    assert fleet.decode(x, strategy="serial").shape == (1, 1, 8, 8)
    os.kill(fleet.pids[0], signal.SIGKILL)
    assert_ends(fleet.pids)
    time.sleep(0.3)
    with pytest.raises(LostGroupError, match=r"restart\(\).*rank 0.*SIGKILL"):
        fleet.decode(x)
    fleet.restart()
    second = fleet.pids
    # nobody holds it any more
    del fleet
    gc.collect()
    assert_ends(second)


def test_a_folder_that_holds_no_vae(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline" / "vae"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(PlanError, match=f"did you mean {folder}"):
        Fleet(tmp_path / "pipeline", ranks=2)
    with pytest.raises(PlanError, match="not a folder"):
        Fleet(tmp_path / "nowhere", ranks=2)
    with pytest.raises(PlanError, match="_class_name"):
        Fleet(folder, ranks=2)


def has_no_room() -> torch.nn.Module:
    raise MemoryError("no room for the weights")


def test_a_model_that_cannot_be_loaded_is_one_error() -> None:
    before = children(os.getpid())
    with pytest.raises(RemoteRankError, match="failed with MemoryError: no room for the weights") as caught:
        Fleet(has_no_room, ranks=2)
    assert "in has_no_room" in str(caught.value.__cause__)
    with pytest.raises(MissingRankError, match=r"worker of rank 0 .* has ended: SIGKILL \(out of memory\?\)"):
        Fleet(partial(signal.raise_signal, signal.SIGKILL), ranks=1)
    with pytest.raises(MissingRankError, match=r"worker of rank 0 .* has ended: exit code 3"):
        Fleet(partial(os._exit, 3), ranks=1)
    assert children(os.getpid()) == before


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (PlanError, "ranks=0", {"ranks": 0}),
        (PlanError, "threads=0", {"ranks": 1, "threads": 0}),
        (PlanError, "dtype", {"ranks": 1, "dtype": torch.int8}),
        (PlanError, "list of 2 devices", {"ranks": 2, "devices": ["cpu"]}),
        (PlanError, "list of 2 devices", {"ranks": 2, "devices": "cpu"}),
        (PlanError, "cuda:99", {"ranks": 1, "devices": ["cuda:99"]}),
        (PlanError, "gpu", {"ranks": 1, "devices": ["gpu"]}),
        (UnsupportedError, "mps", {"ranks": 1, "devices": ["mps"]}),
    ],
)
def test_a_fleet_that_cannot_be(error: type[Exception], match: str, arguments: dict[str, object]) -> None:
    with pytest.raises(error, match=match):
        Fleet(obedient_vae, **arguments)


def test_a_source_that_cannot_travel() -> None:
    with pytest.raises(UnsupportedError, match="defines by name"):
        Fleet(lambda: None, ranks=1)
    with pytest.raises(PlanError, match="not a Identity"):
        Fleet(torch.nn.Identity(), ranks=1)


SOURCES = str(Path(halotile.__file__).parents[1])
# a decoder that every process can import, and whose work takes as long as a program wants
UNGUARDED = """
import functools, sys, torch, halotile
fleet = halotile.Fleet(functools.partial(torch.nn.Upsample, scale_factor=2), ranks=2)
x = torch.arange(16.0).reshape(1, 1, 4, 4)
assert torch.equal(fleet.decode(x, strategy="serial"), torch.nn.functional.interpolate(x, scale_factor=2))
print(*fleet.pids, flush=True)
"""
FORKS = """
import os, time
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(60)
"""
FACTORY_IN_MAIN = """
import sys, time, torch, halotile
class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(float(x.max()))
        return x
def make():
    return Slow()
{guard}
    with halotile.Fleet(make, ranks=2) as fleet:
        fleet.decode(torch.zeros(1, 1, 4, 4))
        print(*fleet.pids, flush=True)
        fleet.decode(torch.full((1, 1, 4, 4), 60.0))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs, which end with the test."""
    programs = []

    def start(*command: str) -> subprocess.Popen[str]:
        environment, pipe = {**os.environ, "PYTHONPATH": SOURCES}, subprocess.PIPE
        program = subprocess.Popen(
            [sys.executable, *command], stdout=pipe, stderr=pipe, text=True, env=environment, cwd=tmp_path
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.communicate(timeout=10)


def test_an_unguarded_script_works_and_leaves_nothing(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(UNGUARDED)
    first = started(str(script))
    # not in the main thread, and another process holds its pipes open when it is killed
    in_a_thread = f"import threading\nthread = threading.Thread(target=exec, args=({UNGUARDED + FORKS!r}, {{}}))\n"
    second = started("-c", in_a_thread + "thread.start(); thread.join()")
    assert second.stdout is not None
    pids = tuple(map(int, second.stdout.readline().split()))
    forked = int(second.stdout.readline())
    assert len(alive(pids)) == 2
    second.kill()
    try:
        assert_ends(pids, within_s=5)
        assert alive((forked,))
    finally:
        os.kill(forked, signal.SIGKILL)
    shown, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert_ends(tuple(map(int, shown.split())))


def test_workers_in_the_midst_of_a_job_end_with_their_program(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(FACTORY_IN_MAIN.format(guard='if __name__ == "__main__":'))
    programs = {end: started(str(script)) for end in (signal.SIGINT, signal.SIGKILL)}
    for end, program in programs.items():
        assert program.stdout is not None
        pids = tuple(map(int, program.stdout.readline().split()))
        assert len(alive(pids)) == 2
        time.sleep(0.3)
        program.send_signal(end)
        assert_ends(pids, within_s=5)
        _, errors = program.communicate(timeout=20)
        assert ("KeyboardInterrupt" in errors) == (end == signal.SIGINT)


def test_an_unguarded_factory_is_one_clear_error(tmp_path: Path, started: Callable[..., subprocess.Popen[str]]) -> None:
    script = tmp_path / "program.py"
    script.write_text(FACTORY_IN_MAIN.format(guard="if True:"))
    shown, errors = started(str(script)).communicate(timeout=60)
    assert shown == ""
    assert errors.rstrip().splitlines()[-1].startswith("halotile.errors.UnsupportedError: this program starts a Fleet")
    assert "if __name__ == '__main__':" in errors


@pytest.mark.filterwarnings("ignore")
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    cells = [
        UNGUARDED,
        "pids = fleet.pids",
        "import torch.distributed as dist; assert not dist.is_initialized()",
        """
        def mine(): ...
        try:
            halotile.Fleet(mine, ranks=1)
        except halotile.UnsupportedError as error:
            print(error)
        """,
        "fleet.close(); print(fleet.pids)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    nbclient.NotebookClient(book, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pids, refusal, _ = (
        "".join(output["text"] for output in book.cells[at].outputs if output.get("name") == "stdout")
        for at in (0, 3, 4)
    )
    assert "put it into a module file" in refusal
    assert_ends(tuple(map(int, pids.split())))


def test_a_fleet_that_lost_a_worker_or_its_group(fleet: Fleet) -> None:
    """Last of those that share the fleet."""
    pids, began = fleet.pids, time.monotonic()
    with pytest.raises(MissingRankError, match=f"worker of rank 1 .process {pids[1]}. has ended: SIGKILL.*restart"):
        fleet.decode(latents(RANK_1_DIES), strategy="tile")
    assert time.monotonic() - began < 10
    assert_ends(pids)
    with pytest.raises(LostGroupError, match=r"restart\(\).*rank 1"):
        fleet.decode(latents())
    fleet.restart()
    assert torch.equal(fleet.decode(latents(), strategy="tile"), one_rank("decode", latents()))
    # started anew while another thread waits for a job
    begun, errors = threading.Event(), []

    def waits() -> None:
        try:
            fleet.decode(latents(SLOW), strategy="tile", progress=lambda done, total: begun.set())
        except MissingRankError as error:
            errors.append(str(error))

    thread = threading.Thread(target=waits)
    thread.start()
    assert begun.wait(20)
    fleet.restart()
    thread.join(5)
    assert len(errors) == 1
    assert "it was closed" in errors[0]
    assert fleet.decode(latents(), strategy="tile").isfinite().all()
    # rank 1 fails in the midst of a sharded decode: the others may wait for its rows
    with pytest.raises(RemoteRankError, match="ordered to fail on rank 1"):
        fleet.decode(latents(RANK_1_FAILS), strategy="shard")
    with pytest.raises(LostGroupError, match=r"restart\(\).*group was lost"):
        fleet.decode(latents())
    assert len(alive(fleet.pids)) == 2
