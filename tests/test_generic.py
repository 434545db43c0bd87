"""Classes that halotile has no row for: handled as far as their loop allows, refused with the reason where not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from ranks import run_ranks
from torch import nn

import halotile
from halotile.errors import UnsupportedError


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


def _generic(group, kind):
    torch.manual_seed(0)
    vae = kind().eval()
    z = torch.randn(1, 3, 20, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.manual_seed(4)
        expected = vae.decode(z).sample
        # ranks whose generators differ see the first rank's numbers
        torch.manual_seed(4 + torch.distributed.get_rank(group))
        with halotile.parallelize(vae, group, strategy="tile", halves=("decode",)) as handle:
            out = vae.decode(z).sample
    return out, expected, handle.report


@pytest.mark.parametrize(
    ("kind", "chains", "calls"),
    [(Plain, 5, 5), (ListCache, 5, 10), (ReturnedCache, 5, 10), (Interleaved, 5, 10), (Noisy, 5, 5)],
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


REFUSED = [
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
        assert said in report.reason
