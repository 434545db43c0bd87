"""Classes that halotile has no row for: handled as far as their loop allows, refused with the reason where not."""

from __future__ import annotations

import re
from dataclasses import dataclass

import diffusers
import pytest
import torch
from ranks import run_ranks
from torch import nn

import halotile
from halotile.errors import PlanError, UnsupportedError


@dataclass
class Output:
    sample: torch.Tensor


class Network(nn.Module):
    """Nearest upsampling by 2 and a convolution; subclasses keep something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(nn.functional.interpolate(x, scale_factor=2.0))


class Plain(nn.Module):
    """Tiles of 4 rows, no overlap; `order` calls the network for a row's parts in turn."""

    use_tiling = True

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Network()

    def decode(self, z):
        return Output(torch.cat([self.decoder(z[..., i : i + 4, :]) for i in range(0, z.shape[-2], 4)], -2))


class ListCacheNetwork(Network):
    def forward(self, x, cache=None):
        out = super().forward(x if cache[0] is None else x + cache[0])
        cache[0] = x if cache[0] is None else cache[0] + x
        return out


class ListCache(Plain):
    """Two parts a tile, with a list that the second part reads: one chain a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = ListCacheNetwork()

    def decode(self, z):
        rows = []
        for i in range(0, z.shape[-2], 4):
            cache = [None]
            rows += [self.decoder(z[..., j : j + 2, :], cache=cache) for j in (i, i + 2)]
        return Output(torch.cat(rows, -2))


class ReturnedCacheNetwork(Network):
    def forward(self, x, cache=None):
        return super().forward(x if cache is None else x + cache["sum"]), {"sum": x}


class ReturnedCache(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = ReturnedCacheNetwork()

    def decode(self, z):
        rows = []
        for i in range(0, z.shape[-2], 4):
            first, cache = self.decoder(z[..., i : i + 2, :])
            second, _ = self.decoder(z[..., i + 2 : i + 4, :], cache=cache)
            rows += [first, second]
        return Output(torch.cat(rows, -2))


class Interleaved(ListCache):
    """All first parts, then all second parts: chains whose calls are far apart."""

    def decode(self, z):
        starts = range(0, z.shape[-2], 4)
        caches = [[None] for _ in starts]
        first = [self.decoder(z[..., i : i + 2, :], cache=c) for i, c in zip(starts, caches, strict=True)]
        second = [self.decoder(z[..., i + 2 : i + 4, :], cache=c) for i, c in zip(starts, caches, strict=True)]
        return Output(torch.cat([part for pair in zip(first, second, strict=True) for part in pair], -2))


class Noisy(Plain):
    class Net(Network):
        def forward(self, x):
            return super().forward(x + torch.randn(x.shape) * torch.randn_like(x))

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()


class ReusesItsInput(Plain):
    """One buffer for the input of every call: kept by reference, all calls would see the last tile."""

    def decode(self, z):
        buffer, parts = torch.empty_like(z[..., :4, :]), []
        for i in range(0, z.shape[-2], 4):
            parts.append(self.decoder(buffer.copy_(z[..., i : i + 4, :])))
        return Output(torch.cat(parts, -2))


class DrawsInTheLoop(Plain):
    def decode(self, z):
        return super().decode(z + torch.randn(z.shape))


def _generic(group, kind):
    torch.manual_seed(0)
    vae = kind().eval()
    z = torch.randn(1, 3, 20, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.manual_seed(4)
        expected = vae.decode(z).sample
        after = torch.rand(1)
        # ranks whose generators differ see the first rank's numbers; what the loop itself draws is up to the program
        torch.manual_seed(4 + (torch.distributed.get_rank(group) if kind is Noisy else 0))
        with halotile.parallelize(vae, group, strategy="tile", halves=("decode",)) as handle:
            out = vae.decode(z).sample
        assert torch.equal(torch.rand(1), after)
    return out, expected, handle.report


@pytest.mark.parametrize(
    ("kind", "chains", "calls"),
    [
        (Plain, 5, 5),
        (ReusesItsInput, 5, 5),
        (DrawsInTheLoop, 5, 5),
        (ListCache, 5, 10),
        (ReturnedCache, 5, 10),
        (Interleaved, 5, 10),
        (Noisy, 5, 5),
    ],
)
def test_loops_without_a_row_are_dealt_by_their_chains(kind, chains: int, calls: int) -> None:
    for n in (1, 2, 3):
        for out, expected, report in run_ranks(_generic, n, kind):
            assert torch.equal(out, expected)
            assert (report.tiles, report.calls) == (chains, calls)
            assert sum(load > 0 for load in report.loads) == n


# --- what cannot be dealt is refused, with the reason; auto decodes serially and says why


class Stateful(Plain):
    class Net(Network):
        kept = None

        def forward(self, x):
            if self.kept is not None:
                x = x + self.kept.mean()
            self.kept = x
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()


class Dependent(Plain):
    def decode(self, z):
        first = self.decoder(z[..., :4, :])
        return Output(self.decoder(first))


class NeedsValues(Plain):
    def decode(self, z):
        parts = [self.decoder(z[..., i : i + 4, :]) for i in range(0, z.shape[-2], 4)]
        return Output(parts[0] if parts[0].mean() > 0 else torch.cat(parts, -2))


class Branches(Plain):
    class Net(Network):
        def forward(self, x):
            return super().forward(x if x.mean() > 0 else -x)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()


class JoinsCachesNetwork(Network):
    def forward(self, x, cache, other=None):
        return super().forward(x)


class JoinsCaches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = JoinsCachesNetwork()

    def decode(self, z):
        one, two = [None], [None]
        parts = [self.decoder(z[..., :4, :], one), self.decoder(z[..., 4:8, :], two)]
        return Output(torch.cat([*parts, self.decoder(z[..., 8:12, :], one, two)], -2))


class NoTensor(Plain):
    class Net(Network):
        def forward(self, x):
            return {"sample": super().forward(x)}

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()

    def decode(self, z):
        return Output(torch.cat([self.decoder(z[..., i : i + 4, :])["sample"] for i in range(0, z.shape[-2], 4)], -2))


class OwnGenerator(Plain):
    class Net(Network):
        def forward(self, x):
            return super().forward(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()


class SetsFlags(Plain):
    class Net(Network):
        flip = False

        def __init__(self) -> None:
            super().__init__()
            self.flip = False

        def forward(self, x):
            return super().forward(-x if self.flip else x)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()

    def decode(self, z):
        parts = []
        for i in range(0, z.shape[-2], 4):
            self.decoder.flip = i > 0
            parts.append(self.decoder(z[..., i : i + 4, :]))
        return Output(torch.cat(parts, -2))


class CallsAPart(Plain):
    def decode(self, z):
        return Output(torch.cat([self.decoder.conv(z[..., i : i + 4, :]) for i in range(0, z.shape[-2], 4)], -2))


class DictCache(Plain):
    class Net(Network):
        def forward(self, x, cache):
            x = x + cache.get("sum", 0)
            cache["sum"] = x
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()

    def decode(self, z):
        cache = {}
        return Output(torch.cat([self.decoder(z[..., i : i + 4, :], cache) for i in range(0, z.shape[-2], 4)], -2))


class NestedList(DictCache):
    class Net(Network):
        def forward(self, x, cache):
            x = x if cache[0][0] is None else x + cache[0][0]
            cache[0][0] = x
            return super().forward(x)

    def decode(self, z):
        cache = ([None], 0)
        return Output(torch.cat([self.decoder(z[..., i : i + 4, :], cache) for i in range(0, z.shape[-2], 4)], -2))


class ResetsList(DictCache):
    class Net(Network):
        def forward(self, x, position):
            position[0] += 1
            return super().forward(x * position[0])

    def decode(self, z):
        position, parts = [0], []
        for i in range(0, z.shape[-2], 4):
            position[0] = i
            parts.append(self.decoder(z[..., i : i + 4, :], position))
        return Output(torch.cat(parts, -2))


class FlagForTheLoop(SetsFlags):
    def decode(self, z):
        self.decoder.flip = True
        try:
            return Plain.decode(self, z)
        finally:
            self.decoder.flip = False


class SetsABuffer(Plain):
    class Net(Network):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(1))

        def forward(self, x):
            return super().forward(x + self.offset)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()

    def decode(self, z):
        parts = []
        for i in range(0, z.shape[-2], 4):
            self.decoder.offset.fill_(i)
            parts.append(self.decoder(z[..., i : i + 4, :]))
        return Output(torch.cat(parts, -2))


class CountsInAList(Plain):
    class Net(Network):
        def __init__(self) -> None:
            super().__init__()
            self.count = [0]

        def forward(self, x):
            self.count[0] += 1
            return super().forward(x * self.count[0])

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Net()


class UnderAutocast(Plain):
    def decode(self, z):
        with torch.autocast("cpu", torch.bfloat16):
            return super().decode(z)


class CacheOfTheFirst(ReturnedCache):
    def decode(self, z):
        first, cache = self.decoder(z[..., :4, :])
        parts = [first, *(self.decoder(z[..., i : i + 4, :], cache=cache)[0] for i in range(4, z.shape[-2], 4))]
        return Output(torch.cat(parts, -2))


REFUSED = [
    (CacheOfTheFirst, "the cache of one that others followed already"),
    (DictCache, "gives its network a dict"),
    (NestedList, "gives its network a tuple"),
    (ResetsList, "changes a list"),
    (FlagForTheLoop, r"the loop sets \.flip"),
    (SetsABuffer, r"the loop sets \.offset"),
    (CountsInAList, "keeps state from call to call on its modules"),
    (UnderAutocast, "the loop sets autocast on cpu"),
    (SetsFlags, r"the loop sets \.flip"),
    (CallsAPart, "never calls its Network as a whole"),
    (Stateful, "keeps state from call to call on its modules"),
    (Dependent, "given the result of an earlier call"),
    (NeedsValues, "cannot be recorded"),
    (Branches, "cannot be foreseen from shapes alone"),
    (JoinsCaches, "joins the caches of two others"),
    (NoTensor, "returns a dict first"),
    (OwnGenerator, "generator of its own"),
]


@pytest.mark.parametrize(("kind", "said"), REFUSED)
def test_loops_that_cannot_be_dealt_are_refused_with_the_reason(kind, said: str) -> None:
    vae, z = kind().eval(), torch.randn(1, 3, 20, 5)
    before = {key: set(vars(part)) for key, part in vae.named_modules()}
    with torch.no_grad(), pytest.raises(UnsupportedError, match=said):
        halotile.decode(vae, z, strategy="tile")
    assert {key: set(vars(part)) for key, part in vae.named_modules()} == before


def _auto_serial(group, kind):
    vae, z = kind().eval(), torch.randn(1, 3, 20, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with halotile.parallelize(vae, group, halves=("decode",)) as handle:
            out = vae.decode(z).sample
        return out, kind().eval().decode(z).sample, handle.report


@pytest.mark.parametrize(("kind", "said"), REFUSED)
def test_auto_decodes_them_serially_and_says_why(kind, said: str) -> None:
    for out, expected, report in run_ranks(_auto_serial, 2, kind):
        assert torch.equal(out, expected)
        assert report.strategy == "serial"
        assert re.search(said, report.reason)


class LosesRows(Plain):
    def decode(self, z):
        return Output(torch.cat([self.decoder(z[..., i : i + 4, :])[..., :6, :] for i in range(0, 20, 4)], -2))


def test_a_loop_that_loses_rows_is_refused_with_the_numbers() -> None:
    with (
        torch.no_grad(),
        pytest.raises(PlanError, match="makes 30 rows or columns of 20, but its network makes 8 of 4"),
    ):
        halotile.decode(LosesRows().eval(), torch.randn(1, 3, 20, 5), strategy="tile")


# --- classes of diffusers beyond the twenty kinds


def _more(name: str):
    torch.manual_seed(0)
    window = {"tile_sample_min_height": 64, "tile_sample_min_width": 64}
    latent = {"tile_latent_min_height": 8, "tile_latent_min_width": 8}
    if name == "AutoencoderKLKVAE":
        kwargs = {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 1, 2, 2)}
        attributes, shapes = {"tile_sample_min_size": 64, "tile_latent_min_size": 8}, ((4,), (3,), 8)
    elif name == "AutoencoderKLQwenImage21":
        kwargs = {
            "base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2, 2], "num_res_blocks": 1,
            "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
        }  # fmt: skip
        attributes = {**window, "tile_sample_stride_height": 48, "tile_sample_stride_width": 48}
        shapes = ((4, 1), (4, 1), 16)
    elif name == "AutoencoderKLHunyuanImageRefiner":
        kwargs = {"latent_channels": 8, "block_out_channels": (16, 32, 32, 64, 64), "layers_per_block": 1}
        attributes, shapes = {}, ((8, 2), (3, 5), 16)
    elif name == "AutoencoderKLAllegro":
        kwargs = {"block_out_channels": (16,) * 4, "layers_per_block": 1, "norm_num_groups": 8}
        attributes, shapes = {"kernel": (8, 64, 64), "stride": (4, 48, 48)}, ((4, 3), (3, 12), 8)
    elif name.startswith("AutoencoderVidTok"):
        kwargs = {"ch": 32, "ch_mult": [1, 1, 2, 2], "z_channels": 4, "num_res_blocks": 1}
        kwargs["is_causal"] = name.endswith("causal")
        attributes, shapes = {**window, **latent}, ((4, 4), (3, 16), 8)
    else:
        kwargs = {
            "encoder_block_out_channels": (16,) * 4, "decode_block_out_channels": (16,) * 4, "latent_channels": 4,
            "attention_resolutions": (), "resolution": 64, "num_layers": 1,
        }  # fmt: skip
        attributes, shapes = {}, ((4, 2), (3, 9), 8)
    vae = getattr(diffusers, name.split(maxsplit=1)[0])(**kwargs).eval().requires_grad_(False)
    for key, value in {**attributes, "use_tiling": True}.items():
        setattr(vae, key, value)
    return vae, shapes


def _more_over_ranks(group, name: str, half: str, strategy: str):
    vae, (latent, pixels, scale) = _more(name)
    # with a window of 8 latents every 6, the last tiles of both axes are clipped
    cells = (14 * scale, 9 * scale) if half == "encode" else (14, 9)
    x = torch.randn(1, *(latent if half == "decode" else pixels), *cells, generator=torch.Generator().manual_seed(0))
    call = halotile.decode if half == "decode" else halotile.encode
    with torch.no_grad():
        return call(vae, x, group, strategy)


@pytest.mark.parametrize("half", ["decode", "encode"])
@pytest.mark.parametrize("name", ["AutoencoderKLKVAE", "AutoencoderKLQwenImage21", "AutoencoderVidTok"])
def test_more_classes_of_diffusers_are_bitwise_equal(name: str, half: str) -> None:
    expected = _more_over_ranks(halotile.Ranks.alone(), name, half, "serial")
    assert all(torch.equal(out, expected) for out in run_ranks(_more_over_ranks, 2, name, half, "tile"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AutoencoderKLHunyuanImageRefiner", "loses the rest"),
        ("AutoencoderVidTok causal", "cache_offset"),
        ("AutoencoderKLCosmos", "no tile loop of its own"),
    ],
)
def test_more_classes_of_diffusers_are_refused_with_the_reason(name: str, said: str) -> None:
    vae, (latent, _, _) = _more(name)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=said):
        halotile.decode(vae, torch.zeros(1, *latent, 20, 20), strategy="tile")
