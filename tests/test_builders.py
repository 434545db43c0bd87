"""LTX-style objects: frames `F H W C` on the driver, whatever the decoder inside is called."""

from __future__ import annotations

import pytest
import tiny_vaes as tiny
import torch
from ranks import run_ranks
from torch import nn

from halotile import (
    DimensionTilingConfig,
    DistributedDecoderBuilder,
    DistributedVideoDecoder,
    MembershipError,
    PlanError,
    TileCountConfig,
    UnsupportedError,
)
from halotile.comm import Mailbox, Ranks

KIND = "AutoencoderKLLTX2Video"
# the usual setting: height in 8 tiles that share 4 latent rows
EIGHT = TileCountConfig(height=DimensionTilingConfig(8, 4))


def latent():
    torch.manual_seed(1)
    return torch.randn(1, tiny.latent(KIND).shape[1], 3, 36, 10)


class _Native(nn.Module):
    """A decoder of another library: frames `F H W C` in 0 to 1, in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = tiny.build(KIND)
        self.asked: list[object] = []

    def decode_video(self, latent, tiling_config=None, generator=None):
        self.asked.append((tiling_config, generator))
        frames = (self.vae.decode(latent).sample[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1)
        return iter(frames.split(4))


class _Inner:
    def __init__(self, make) -> None:
        self.make, self.given = make, None

    def build(self, **given):
        self.given = given
        return self.make()


def _decoded(group, native, queue, driver):
    inner = _Inner(_Native if native else lambda: tiny.build(KIND))
    builder = DistributedDecoderBuilder(inner, queue, group, EIGHT, driver_rank=driver, registry="kept")
    decoder = builder.build(device="cpu", dtype=torch.float32, more=1)
    assert inner.given == {"device": "cpu", "dtype": torch.float32, "registry": "kept", "more": 1}
    with torch.no_grad():
        return [frames.clone() for frames in decoder.decode_video(latent(), device_fn=lambda index: "cpu")]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("mailbox", [False, True])
def test_frames_come_to_the_driver_alone(native: bool, mailbox: bool) -> None:
    first, second = run_ranks(_decoded, 2, native, Mailbox(60.0) if mailbox else None, 1)
    assert first == []
    frames = torch.cat(second)
    assert frames.shape[-1] == 3
    assert frames.min() >= 0
    assert frames.max() <= 1
    with torch.no_grad():
        whole = tiny.build(KIND).decode(latent()).sample[0].movedim(0, -1) / 2 + 0.5
    assert frames.shape == whole.shape
    alone = DistributedVideoDecoder(_Native() if native else tiny.build(KIND), None, Ranks.alone(), EIGHT)
    with torch.no_grad():
        assert torch.equal(torch.cat(list(alone.decode_video(latent()[0]))), frames)


def test_tiling_config_and_generator_are_the_decoders_own() -> None:
    native, generator = _Native(), torch.Generator().manual_seed(4)
    decoder = DistributedVideoDecoder(native, None, Ranks.alone(), TileCountConfig(height=DimensionTilingConfig(2, 4)))
    with torch.no_grad():
        list(decoder.decode_video(latent(), tiling_config="small", generator=generator))
    assert [asked[0] for asked in native.asked[-2:]] == ["small"] * 2
    plain = DistributedVideoDecoder(tiny.build(KIND), None, Ranks.alone(), EIGHT)
    with pytest.raises(UnsupportedError, match="call enable_tiling of AutoencoderKLLTX2Video"):
        plain.decode_video(latent(), tiling_config="small")


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="int has neither decode_video nor decode"):
        DistributedVideoDecoder(3, None, Ranks.alone(), EIGHT)
    with pytest.raises(UnsupportedError, match=r"int has no build\(\)"):
        DistributedDecoderBuilder(3, None, Ranks.alone(), EIGHT)
    with pytest.raises(MembershipError, match="driver_rank=5 is a global rank"):
        DistributedVideoDecoder(tiny.build(KIND), None, Ranks.alone(), EIGHT, driver_rank=5)
    decoder = DistributedVideoDecoder(tiny.build(KIND), None, Ranks.alone(), EIGHT)
    for wrong in (torch.zeros(2, 4, 3, 36, 10), torch.zeros(36, 10)):
        with pytest.raises(PlanError, match="one video is C F H W or 1 C F H W"):
            decoder.decode_video(wrong)
