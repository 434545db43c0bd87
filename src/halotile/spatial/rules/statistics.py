"""Mean and squared deviations of rows that are spread over ranks: one collective, merged by Chan's formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from halotile.spatial.ledger import Ledger
from halotile.spatial.watching import unwatched

# A piece and its float32 deviations stay in the level-2 cache of a CPU core. On a GPU it only bounds the copy.
_CPU_PIECE = 1 << 17
_GPU_PIECE = 1 << 25
_SHORT = 512
_RUN = 4096


def merged_moments(
    local: torch.Tensor, dims: Sequence[int], counts: Sequence[int], ledger: Ledger
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and M2 (the sum of squared deviations from it) over `dims` of all ranks' rows, in float64.

    `counts` says how many elements each rank puts into one result. The dims are dropped. Every rank adds the same
    numbers in the same order, so all have the same bits. T. F. Chan, G. H. Golub, R. J. LeVeque: Updating formulae
    and a pairwise algorithm for computing sample variances (1979).
    """
    ranks = ledger.ranks
    ledger.rounded |= ranks.size > 1
    # thousands of small operations a decode, which are no modes' business: each would pass all of them
    with unwatched():
        own = torch.stack(local_moments(local, dims))
        parts = torch.stack(ranks.transport.all_gather(own) if ranks.size > 1 else [own])
        return _chan(tuple(counts), parts[:, 0], parts[:, 1])


def local_moments(local: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and M2 of this rank's rows over `dims`, in float32 at least; zeros for no rows.

    ||x||^2 - n mean^2 would be as cheap, but cancels where the mean is far from zero: 3 % off at mean / std = 100.
    `torch.var_mean` does not, and takes six times as long on a CPU. So where it would cancel the deviations are made, a
    cache-sized piece at a time. That is this rank's choice alone: it sends nothing.
    """
    kept = [d for d in range(local.dim()) if d not in dims]
    if not local.numel():
        nothing = local.new_zeros([local.shape[d] for d in kept], dtype=_statistics_dtype(local))
        return nothing, nothing
    if local.device.type != "cpu" and local.dtype == _statistics_dtype(local):
        var, mean = torch.var_mean(local, tuple(dims), correction=0)
        return mean, var * (local.numel() // mean.numel())
    # in the order of memory, so that pieces are close together and deviations have the layout of what they are from
    strides = local.stride()
    order = sorted(range(local.dim()), key=lambda d: (-strides[d], d))
    dense, along = local.permute(order), [order.index(d) for d in dims]
    quick = _at_once(dense, along) if local.device.type == "cpu" else None
    mean, m2 = _in_pieces(dense, along) if quick is None else quick
    back = [sum(order.index(d) > order.index(e) for e in kept) for d in kept]
    return mean.permute(back), m2.permute(back)


def _at_once(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The moments of a dense float32 `x` from the sums and the norms of short runs: two reads and no copy, on a CPU.

    The runs are short because a norm adds up without a tree: it is some 1e-5 off over 100,000 elements, 5e-7 over a
    run. None where the difference that M2 is would cancel: where the mean is more than twice the deviation.
    """
    kept = [d for d in range(x.dim()) if d not in dims]
    if x.dtype != torch.float32 or not x.is_contiguous() or (kept and max(kept) > min(dims)):
        return None
    size = prod(x.shape[d] for d in dims)
    rows = x.view(-1, size)
    whole = size // _RUN * _RUN
    runs = [part for part in (torch.unflatten(rows[:, :whole], 1, (-1, _RUN)), rows[:, None, whole:]) if part.numel()]
    total = sum(part.sum(-1).double().sum(-1) for part in runs)
    squares = sum(torch.linalg.vector_norm(part, dim=-1).double().square_().sum(-1) for part in runs)
    assert isinstance(total, torch.Tensor)
    mean = total / size
    m2 = squares - total * mean
    if bool((total * mean > 4 * m2).any()):
        return None
    shape = [x.shape[d] for d in kept]
    return mean.float().view(shape), m2.float().view(shape)


def _in_pieces(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of a dense `x` whose dims are in the order of memory."""
    limit = _CPU_PIECE if x.device.type == "cpu" else _GPU_PIECE
    size = prod(x.shape[d] for d in dims)
    shape = [x.shape[d] for d in range(x.dim()) if d not in dims]
    last_kept = max((d for d in range(x.dim()) if d not in dims and x.shape[d] > 1), default=-1)
    inner = [d for d in dims if d > last_kept]
    outer = [d for d in dims if d < last_kept and x.shape[d] > 1]
    if not outer and x.is_contiguous():
        rows, spans = x.view(-1, size), _spans(size, limit)
        parts = [_rows(rows[:, a:b], limit) for a, b in spans]
        counts = tuple(b - a for a, b in spans)
    elif outer and prod(x.shape[d] for d in inner) in range(2, _SHORT):
        # the channels of a group in channels_last: sums of a few neighbours at a time are slow, sums of rows are not
        parts = [_in_pieces(x, [d for d in dims if d not in inner])]
        means, m2s = (part.reshape(*shape, -1).movedim(-1, 0) for part in parts[0])
        counts = (size // means.shape[0],) * means.shape[0]
        return _narrowed(_chan(counts, means, m2s), means.dtype)
    else:
        cut = outer[0] if outer else dims[0]
        each = x.numel() // x.shape[cut]
        spans = _spans(x.shape[cut], max(1, limit // each))
        buffer = _buffer(x, each * (spans[0][1] - spans[0][0]))
        parts = [_piece(x.narrow(cut, a, b - a), dims, buffer) for a, b in spans]
        counts = tuple((b - a) * size // x.shape[cut] for a, b in spans)
    if len(parts) > 1:
        means, m2s = (torch.stack(column) for column in zip(*parts, strict=True))
        parts = [_narrowed(_chan(counts, means, m2s), means.dtype)]
    return parts[0][0].view(shape), parts[0][1].view(shape)


def _rows(rows: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of each row, some rows at a time."""
    spans = _spans(rows.shape[0], max(1, limit // rows.shape[1]))
    buffer = _buffer(rows, (spans[0][1] - spans[0][0]) * rows.shape[1])
    parts = [_piece(rows[a:b], [1], buffer) for a, b in spans]
    mean, m2 = (torch.cat(column) for column in zip(*parts, strict=True))
    return mean, m2


def _piece(piece: torch.Tensor, dims: list[int], buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of one piece; its deviations go into `buffer`."""
    deviations = buffer[: piece.numel()].view(piece.shape)
    if piece.dtype != buffer.dtype:
        piece = deviations.copy_(piece)
    mean = piece.sum(dims, keepdim=True).div_(prod(piece.shape[d] for d in dims))
    torch.sub(piece, mean, out=deviations)
    # not vector_norm: it adds up without a tree, and is some 1e-5 off over a piece
    return mean.squeeze(dims), deviations.square_().sum(dims)


def _chan(counts: tuple[int, ...], means: torch.Tensor, m2s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge along the first dim the moments of parts of `counts` elements each."""
    weights = _weights(counts, means.device).view(-1, *[1] * (means.dim() - 1))
    means = means.double()
    mean = (means * weights).sum(0) / sum(counts)
    return mean, m2s.double().sum(0) + ((means - mean).square_() * weights).sum(0)


@lru_cache(maxsize=1024)
def _weights(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # kept, because a copy to a GPU waits for what runs there
    with torch.inference_mode(False):
        return torch.tensor(counts, dtype=torch.float64, device=device)


def _narrowed(parts: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return parts[0].to(dtype), parts[1].to(dtype)


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(first, min(first + step, total)) for first in range(0, total, step)]


def _buffer(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty(size, dtype=_statistics_dtype(like))


def _statistics_dtype(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32
