"""The stream of a grid decode through a `Mailbox`: the same bits as over the group, and nobody waits for the driver."""

from __future__ import annotations

import time

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile import DimensionTilingConfig as Dim
from halotile import TileCountConfig
from halotile.comm import Mailbox

KIND = "AutoencoderKLLTX2Video"
GRIDS = {
    "1x8x1": TileCountConfig(height=Dim(8, 4)),
    "2x2x2": TileCountConfig(frames=Dim(2, 1), height=Dim(2, 4), width=Dim(2, 2)),
}


def _latents():
    torch.manual_seed(3)
    return torch.randn(*tiny.latent(KIND).shape[:2], 3, 12, 6)


def _streamed(group, mailbox, grid, slow=-1):
    vae = tiny.build(KIND)
    if group.rank() == slow:
        plain = vae.decoder.forward
        vae.decoder.forward = lambda *args, **kwargs: (time.sleep(0.02), plain(*args, **kwargs))[1]
    batches = halotile.stream(vae, _latents(), group, tiling=GRIDS[grid], mailbox=mailbox)
    return [batch.clone() for batch in batches]


@pytest.mark.parametrize(("grid", "size", "slows"), [("1x8x1", 2, [1]), ("2x2x2", 3, [0, 2]), ("2x2x2", 1, [0])])
def test_the_same_bits_as_over_the_group(grid: str, size: int, slows: list[int]) -> None:
    (over_group, *others) = run_ranks(_streamed, size, None, grid)
    for slow in slows:
        (through_mailbox, *rest) = run_ranks(_streamed, size, Mailbox(60.0), grid, slow)
        assert len(through_mailbox) == len(over_group)
        assert all(map(torch.equal, through_mailbox, over_group))
        assert rest == others == [[]] * (size - 1)


def _one_after_the_other(group, mailbox):
    """A stream that is left, one whose driver comes late, and a plain call between them."""
    vae, z = tiny.build(KIND), _latents()
    left = halotile.stream(vae, z, group, tiling=GRIDS["2x2x2"], mailbox=mailbox)
    if group.rank() == 0:
        next(left)
        left.close()
    halotile.decode(vae, z, group, strategy="serial")
    late = halotile.stream(vae, z, group, tiling=GRIDS["2x2x2"], mailbox=mailbox)
    board = halotile.Ranks.of(group).transport.board
    if group.rank() == 0:
        # would never come if the other rank waited for this one to iterate
        while board.get("the others are done") is None:
            time.sleep(0.01)
    else:
        board.set("the others are done", b"yes")
    return [batch.clone() for batch in late]


def test_a_stream_that_is_left_and_a_driver_that_comes_late() -> None:
    (expected, _) = run_ranks(_streamed, 2, None, "2x2x2")
    (driver, other) = run_ranks(_one_after_the_other, 2, Mailbox(60.0, in_flight=1))
    assert all(map(torch.equal, driver, expected))
    assert len(driver) == len(expected)
    assert other == []
