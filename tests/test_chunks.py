"""`ChunkDecoder`: a clip in chunks is the whole clip, for every class that can, whatever the chunks and the ranks."""

from __future__ import annotations

from functools import cache

import pytest
import tiny_vaes as tiny
import torch
from chunked import CAUSAL, FRAMES, HEIGHT, ROUNDING, WIDTH, WINDOWED, build, clip, in_chunks, joined, whole
from ranks import run_ranks

import halotile


@pytest.mark.parametrize("name", FRAMES)
def test_chunks_are_the_whole(name):
    vae, x = build(name), clip(name)
    expected = whole(vae, x)
    for sizes in (1, 2, (1, 3), 99):  # the last is the whole clip
        decoder = halotile.ChunkDecoder(vae, frames=x.shape[2])
        assert torch.equal(joined(in_chunks(decoder, x, sizes)), expected), sizes
        assert decoder.report.latent_frames == x.shape[2]
        assert decoder.report.frames == expected.shape[2]


# a process follows a network with fake tensors once, and not once a number of ranks
_built = cache(build)


@cache
def _whole(name, tiled):
    return whole(_built(name, tiled), clip(name))


def _strategies(group, name, strategies=("tile", "shard"), sizes=(1, 3, 2)):
    """For each strategy the frames, what ran, and in how many tiles."""
    found = {}
    for strategy in strategies:
        x = clip(name)
        decoder = halotile.ChunkDecoder(_built(name, strategy == "tile"), group, strategy, frames=x.shape[2])
        got = joined(in_chunks(decoder, x, sizes))
        report = decoder.report.last
        found[strategy] = got, report.strategy, report.tiles
    return found


@pytest.mark.parametrize(
    # on three ranks one of each way to keep state
    ("name", "ranks"),
    [*((name, ranks) for name in FRAMES for ranks in (1, 2)), *((name, 3) for name in CAUSAL[1::2]), (CAUSAL[4], 3)],
)
def test_strategies_on_ranks(name, ranks):
    results = run_ranks(_strategies, ranks, name) if ranks > 1 else [_strategies(None, name, ("tile",))]
    for found in results:
        for strategy, (got, ran, tiles) in found.items():
            error = float((got - _whole(name, strategy == "tile")).abs().max())
            assert ran == strategy
            assert (tiles > 1) == (strategy == "tile")
            # Magvit puts all frames of a tile through one convolution first, whose kernel goes by their number
            exact = strategy == "serial" or (strategy == "tile" and name != "AutoencoderKLMagvit")
            assert error <= (0.0 if exact else ROUNDING), (strategy, error)


def test_the_first_latent_gives_the_first_frames():
    vae, x = build("AutoencoderKLWan_2.1"), clip("AutoencoderKLWan_2.1")
    decoder = halotile.ChunkDecoder(vae)
    assert decoder.report.first_frames_s is None
    first = decoder.push(x[:, :, :1])
    assert torch.equal(first, whole(vae, x)[:, :, :1])
    assert 0 < decoder.report.first_frames_s <= decoder.report.seconds
    assert decoder.push(x[:, :, 1:2]).shape[2] == 4


def test_frames_leave_a_window_at_a_time():
    x = clip("AutoencoderKLHunyuanVideo", 6)
    parts = in_chunks(halotile.ChunkDecoder(build("AutoencoderKLHunyuanVideo")), x, 1)
    # windows of 4 latent frames every 2, of 4 frames each; the first has one more
    assert [part.shape[2] for part in parts] == [0, 0, 0, 9, 0, 8, 4]
    assert {part.shape[1:2] + part.shape[3:] for part in parts} == {(3, 8 * HEIGHT, 8 * WIDTH)}


@pytest.mark.parametrize("frames", [4, 5])
def test_cogvideox_takes_the_odd_frame_first(frames):
    vae, x = build("AutoencoderKLCogVideoX"), clip("AutoencoderKLCogVideoX", frames)
    parts = in_chunks(halotile.ChunkDecoder(vae, frames=frames), x, 1)
    assert [part.shape[2] for part in parts] == ([0, 8, 0, 8, 0] if frames == 4 else [0, 0, 9, 0, 8, 0])
    assert torch.equal(joined(parts), whole(vae, x))


@pytest.mark.parametrize("name", [*WINDOWED, "AutoencoderKLCogVideoX"])
def test_clips_of_any_length(name):
    vae = build(name)
    if hasattr(vae, "use_framewise_decoding"):
        # a clip of one window has more frames then than the window adds to a longer one
        vae.tile_sample_min_num_frames += vae.temporal_compression_ratio
    # MiniMax-H3 cannot decode fewer than three at all
    for frames in (3, 7, 8, 12) if name == "AutoencoderKLMiniMaxH3" else (1, 2, 3, 4, 5):
        x = clip(name, frames)[..., :2, :2]
        got = joined(in_chunks(halotile.ChunkDecoder(vae, frames=frames), x, 2))
        assert torch.equal(got, whole(vae, x)), frames


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.2", "AutoencoderKLCogVideoX", "AutoencoderKLMiniMaxH3"])
@pytest.mark.parametrize("sliced", [False, True])
def test_batches(name, sliced):
    vae, x = build(name, tiled=True), clip(name, batch=2)
    vae.use_slicing = sliced
    decoder = halotile.ChunkDecoder(vae, None, "tile", frames=x.shape[2])
    assert torch.equal(joined(in_chunks(decoder, x, 2)), whole(vae, x))
    # each sample's tiles have state of their own
    assert decoder.report.last.tiles == (4 if sliced else 2)


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.1", "AutoencoderKLMagvit", "AutoencoderKLLTX2Video"])
@pytest.mark.parametrize("half_weights", [False, True])
def test_bfloat16(name, half_weights):
    vae, x = build(name), clip(name, dtype=torch.bfloat16)
    vae = vae.bfloat16() if half_weights else vae
    got = joined(in_chunks(halotile.ChunkDecoder(vae), x, (2, 1)))
    expected = whole(vae, x if half_weights else x.float())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())


@pytest.mark.parametrize("name", CAUSAL)
def test_the_vae_may_be_used_between_pushes(name):
    vae, x = build(name), clip(name)
    expected, other = whole(vae, x), clip(name, 2).flip(-1)
    decoder = halotile.ChunkDecoder(vae, frames=x.shape[2])
    parts = []
    for part in x.clone().split(2, dim=2):
        before = state_of(vae)
        parts.append(decoder.push(part))
        assert state_of(vae) == before
        # neither is the caller's memory the decoder's
        part.zero_()
        whole(vae, other)
    assert torch.equal(joined([*parts, decoder.finish()]), expected)


def state_of(vae):
    """What a VAE and its modules hold besides weights: names, and values where they are plain."""
    plain = (int, str, bool, type(None))
    return [
        {key: value if isinstance(value, plain) else type(value).__name__ for key, value in vars(part).items()}
        for part in vae.modules()
    ]


def test_two_clips_at_once_and_one_after_the_other():
    vae, name = build("AutoencoderKLWan_2.2"), "AutoencoderKLWan_2.2"
    one, two = clip(name), clip(name).flip(-2)
    first, second = halotile.ChunkDecoder(vae), halotile.ChunkDecoder(vae)
    parts = [(first.push(a), second.push(b)) for a, b in zip(one.split(1, dim=2), two.split(1, dim=2), strict=True)]
    assert torch.equal(joined([a for a, _ in parts]), whole(vae, one))
    assert torch.equal(joined([b for _, b in parts]), whole(vae, two))
    first.reset()
    assert torch.equal(joined(in_chunks(first, two[..., :2], 2)), whole(vae, two[..., :2]))


def _driver_alone(group, name):
    vae, x = build(name, tiled=True), clip(name)
    parts = in_chunks(halotile.ChunkDecoder(vae, group, "tile", "driver", driver=1, frames=x.shape[2]), x, 2)
    return None if parts[0] is None else torch.equal(joined(parts), whole(vae, x)), {part is None for part in parts}


@pytest.mark.parametrize("name", ["AutoencoderKLWan_2.1", "AutoencoderKLCogVideoX", "AutoencoderKLLTX2Video"])
def test_the_driver_alone_gets_the_frames(name):
    assert run_ranks(_driver_alone, 2, name) == [(None, {True}), (True, {False})]


def _fails_once(group, name, tiled):
    vae, x = build(name, tiled), clip(name)
    decoder = halotile.ChunkDecoder(vae, group, "tile" if tiled else "serial", frames=x.shape[2])
    decoder.push(x[:, :, :2])
    hook = None
    if group.rank() == 1:

        def fail(module, args):
            raise OSError("no memory left")

        # late, with the state of the layers before in place
        hook = list(vae.decoder.children())[-1].register_forward_pre_hook(fail)
    with pytest.raises(halotile.RemoteRankError, match=r"rank 1.*no memory left"):
        decoder.push(x[:, :, 2:])
    if hook is not None:
        hook.remove()
    assert all(getattr(part, "prev_features", None) is None for part in vae.modules())
    with pytest.raises(halotile.PlanError, match="is lost"):
        decoder.push(x[:, :, 2:])
    decoder.reset()
    return torch.equal(joined(in_chunks(decoder, x, 2)), whole(vae, x))


@pytest.mark.parametrize(("name", "tiled"), [("AutoencoderKLWan_2.1", True), ("AutoencoderKLMagvit", False)])
def test_a_failure_loses_the_clip_and_not_the_decoder(name, tiled):
    assert run_ranks(_fails_once, 2, name, tiled) == [True, True]


def _out_of_step(group):
    vae, x = build("AutoencoderKLWan_2.1"), clip("AutoencoderKLWan_2.1")
    decoder = halotile.ChunkDecoder(vae, group, "serial")
    parts = [decoder.push(x[:, :, :1])]
    with pytest.raises(halotile.MismatchError, match="shape"):
        decoder.push(x[:, :, 1 : 2 + group.rank()])
    parts.append(decoder.push(x[:, :, 1:]))
    good = torch.equal(joined([*parts, decoder.finish()]), whole(vae, x))
    decoder.reset()
    decoder.push(x)
    if group.rank() == 0:
        decoder.reset()
    with pytest.raises(halotile.MismatchError, match="4 latent frames"):
        decoder.push(x)
    return good


def test_ranks_that_part_ways_are_told_and_go_on():
    assert run_ranks(_out_of_step, 2) == [True, True]


def test_chunks_that_do_not_fit():
    vae, x = build("AutoencoderKLWan_2.1", tiled=True), clip("AutoencoderKLWan_2.1")
    decoder = halotile.ChunkDecoder(vae, frames=4)
    with pytest.raises(halotile.PlanError, match="before any push"):
        decoder.finish()
    first = decoder.push(x[:, :, :1])
    for other in (x[:, :, 1:, :4], x[..., 1:], x[:, :, 1:].double(), x[:, :, 1:].repeat(2, 1, 1, 1, 1)):
        with pytest.raises(halotile.PlanError, match="differ in frames alone"):
            decoder.push(other)
    with pytest.raises(halotile.PlanError, match="B C f H W"):
        decoder.push(x[:, :, 1])
    with pytest.raises(halotile.PlanError, match="no empty dim"):
        decoder.push(x[:, :, :0])
    with pytest.raises(halotile.PlanError, match="frames=4 latent frames; it has 1"):
        decoder.push(x)
    with pytest.raises(halotile.PlanError, match="frames=4 latent frames, and ends after 1"):
        decoder.finish()
    vae.tile_sample_stride_height -= 8
    with pytest.raises(halotile.PlanError, match="tile_sample_stride_height from 24 to 16"):
        decoder.push(x[:, :, 1:])
    vae.tile_sample_stride_height += 8
    # none of it did any harm
    assert torch.equal(joined([first, decoder.push(x[:, :, 1:]), decoder.finish()]), whole(vae, x))
    for call in (decoder.finish, lambda: decoder.push(x)):
        with pytest.raises(halotile.PlanError, match=r"reset\(\) begins another"):
            call()


def test_what_cannot_be_decoded_in_chunks():
    with pytest.raises(halotile.UnsupportedError, match=r"AutoencoderKL cannot .* AutoencoderKLWan"):
        halotile.ChunkDecoder(tiny.build("AutoencoderKL"))
    wan, magvit, minimax = (build(name) for name in ("AutoencoderKLWan_2.1", "AutoencoderKLMagvit", WINDOWED[-1]))
    with pytest.raises(halotile.UnsupportedError, match="sharded"):
        halotile.ChunkDecoder(wan, deliver="sharded")
    with pytest.raises(halotile.UnsupportedError, match="hybrid"):
        halotile.ChunkDecoder(wan, strategy="hybrid", shards_per_tile=1)
    with pytest.raises(halotile.PlanError, match="frames=0"):
        halotile.ChunkDecoder(wan, frames=0)
    with pytest.raises(halotile.PlanError, match=r"2 latent frames at a time.*give frames="):
        halotile.ChunkDecoder(build("AutoencoderKLCogVideoX"))
    magvit.use_slicing = True
    with pytest.raises(halotile.UnsupportedError, match="one sample on to the next"):
        halotile.ChunkDecoder(magvit).push(clip("AutoencoderKLMagvit", batch=2))
    magvit.num_latent_frames_batch_size = 2
    with pytest.raises(halotile.UnsupportedError, match="set it to 1"):
        halotile.ChunkDecoder(magvit).push(clip("AutoencoderKLMagvit"))
    short = halotile.ChunkDecoder(minimax)
    assert short.push(clip(WINDOWED[-1], 2)).shape[2] == 0
    with pytest.raises(halotile.UnsupportedError, match="at least 3 latent frames"):
        short.finish()
    windows = build("AutoencoderKLLTX2Video")
    windows.tile_sample_stride_num_frames = 100
    with pytest.raises(halotile.PlanError, match="stride exceeds the window"):
        halotile.ChunkDecoder(windows).push(clip("AutoencoderKLLTX2Video"))
