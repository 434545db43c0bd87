"""Which strategy runs a call: predicted seconds and bytes of each, what may not run, and the best of the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halotile.planning.deal import deal
from halotile.planning.situation import Decision, Prediction, Rates, Situation, grown, peak_of


def decide(situation: Situation, rates: Rates) -> Decision:
    """The way that is predicted to be the fastest of those that may run; of equals the first of `predictions`.

    The rule, for a VAE whose own tiling is on (and cuts the picture): its window says what a rank may hold. Where each
    rank's rows of the whole picture are no more than one tile, sharding them replaces tiling, as it has no seams; else
    they may not be sharded, and whole tiles are dealt. Hybrid is for fewer tiles than ranks. With tiling off, or a
    window that clears the picture, the whole picture is what one rank may hold. No way may hold more than
    `budget_bytes`; where all would, the one that holds least runs, and where tiling is off and nothing else fits, the
    class's tiles are taken all the same.
    """
    predictions = tuple(_predictions(situation, rates))
    allowed = [each for each in predictions if not each.refused]
    if allowed:
        best = min(allowed, key=lambda each: each.seconds)
        reason = _why(best, allowed, situation, rates)
    else:
        possible = [each for each in predictions if each.peak_bytes is not None and not _cannot(each, situation)]
        best = min(possible, key=lambda each: each.peak_bytes or 0)
        reason = f"{best.name}, since nothing is predicted to fit {situation.budget_bytes} bytes a rank and it is least"
    return Decision(best, f"auto: {reason}", predictions, situation, rates)


def _predictions(situation: Situation, rates: Rates) -> Iterator[Prediction]:
    """Every way there is, in the order of preference between equals."""
    built = [_serial(situation, rates)]
    if situation.ranks > 1:
        built.append(_shard(situation, rates))
        built.append(_tile(situation, rates, 1))
        built += [
            _tile(situation, rates, shards)
            for shards in range(2, situation.ranks + 1)
            if situation.hybrid
            and situation.ranks % shards == 0
            and situation.tiled
            and len(situation.tiles) < situation.ranks
        ]
    out = [_cannot(each, situation) or _too_large(each, situation) for each in built]
    fitting = {each.strategy for each, why in zip(built, out, strict=True) if not why}
    for each, why in zip(built, out, strict=True):
        refused = why
        if not why and situation.tiled and "shard" in fitting and each.strategy != "shard":
            refused = "the height split replaces tiling: no seams, and a rank holds no more than a tile"
        elif not why and each.strategy == "tile" and not situation.tiled and len(fitting) > 1:
            refused = "tiling is off, and the picture fits without"
        yield replace(each, refused=refused)


def _serial(situation: Situation, rates: Rates) -> Prediction:
    cells, flops = situation.cells, situation.flops
    if situation.tiled:
        seconds = sum(_tile_s(rows * columns, situation, rates) for rows, columns in situation.tiles)
        most = peak_of(situation.peak, _largest(situation))
        return Prediction("serial", 1, seconds, None if most is None else _with_finished_tiles(most, situation))
    return Prediction(
        "serial", 1, rates.call_s + grown(flops, cells) / rates.flops_per_s, peak_of(situation.peak, cells)
    )


def _shard(situation: Situation, rates: Rates) -> Prediction:
    share = _share(situation.shape_lat[0], situation.ranks)
    seconds = _sharded_s(situation.cells, share, situation, rates) + _delivery_s(1.0, situation, rates)
    own = peak_of(situation.peak, situation.cells, share)
    # the rows of all ranks come together on each: as they arrive, in their place, and cast
    return Prediction("shard", situation.ranks, seconds, None if own is None else max(own, 3 * situation.result_bytes))


def _tile(situation: Situation, rates: Rates, shards: int) -> Prediction:
    """Whole tiles dealt to subgroups of `shards` ranks; one shard is the strategy `tile`."""
    costs, most = [], 0
    for rows, columns in situation.tiles or (situation.shape_lat,):
        share = _share(rows, shards)
        seconds = (
            _tile_s(rows * columns, situation, rates)
            if shards == 1
            else _sharded_s(rows * columns, share, situation, rates)
        )
        costs += [seconds / situation.chunks] * situation.chunks
        most = max(most, peak_of(situation.peak, rows * columns, share) or 0)
    subgroups = situation.ranks // shards
    # dealt by whole numbers, as the calls are
    owners = deal([round(cost * 1e9) for cost in costs], subgroups, situation.scheduler)
    loads = [0.0] * subgroups
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    seconds = max(loads) + _delivery_s(_decoded(situation), situation, rates)
    peak = _with_finished_tiles(most, situation) if situation.peak else None
    return Prediction("tile" if shards == 1 else "hybrid", shards, seconds, peak)


def _tile_s(cells: int, situation: Situation, rates: Rates) -> float:
    return rates.call_s + grown(situation.flops, cells) / rates.flops_per_s


def _sharded_s(cells: int, share: float, situation: Situation, rates: Rates) -> float:
    work = rates.slowdown * share * grown(situation.flops, cells) / rates.flops_per_s
    return rates.call_s + situation.exchanges * rates.exchange_s + work


def _delivery_s(decoded: float, situation: Situation, rates: Rates) -> float:
    """Everyone gets what the others have: `decoded` times the result, less its own part."""
    return decoded * situation.result_bytes * (1 - 1 / situation.ranks) / rates.bytes_per_s


def _decoded(situation: Situation) -> float:
    """Latent cells of all tiles over those of the picture."""
    return sum(rows * columns for rows, columns in situation.tiles) / situation.cells


def _with_finished_tiles(tile_bytes: int, situation: Situation) -> int:
    """What a loop holds at most: a tile at work beside all finished ones, or two pictures more at the end."""
    finished = _decoded(situation) * situation.result_bytes
    return math.ceil(max(tile_bytes + finished, finished + 2 * situation.result_bytes))


def _share(rows: int, parts: int) -> float:
    """The part of the rows that the rank with most of them has."""
    return math.ceil(rows / parts) / rows


def _largest(situation: Situation) -> int:
    return max(rows * columns for rows, columns in situation.tiles)


def _cannot(each: Prediction, situation: Situation) -> str:
    """Why a way is out whatever it costs."""
    height, width = situation.shape_lat
    if each.strategy == "tile" and (situation.no_tile or len(situation.tiles) < 2):
        return situation.no_tile or "the window clears the picture, so there is one tile"
    if each.strategy == "hybrid":
        thinnest = min(rows for rows, _ in situation.tiles)
        few = thinnest < each.shards_per_tile * situation.min_rows
        thin = f"{thinnest} rows of the thinnest tile are too few for {each.shards_per_tile} ranks" if few else ""
        return situation.no_tile or thin
    if each.strategy == "shard":
        if height < situation.ranks * situation.min_rows:
            return f"{height} latent rows are fewer than {situation.ranks} ranks of {situation.min_rows}"
        rows = math.ceil(height / situation.ranks)
        if situation.tiled and rows * width > _largest(situation):
            return f"{rows} x {width} latents of a rank are more than the {_largest(situation)} of the largest tile"
    return ""


def _too_large(each: Prediction, situation: Situation) -> str:
    budget = situation.budget_bytes
    if budget is None or each.peak_bytes is None or each.peak_bytes <= budget:
        return ""
    return f"{each.peak_bytes} bytes are predicted, and a rank may hold {budget}"


def _why(best: Prediction, allowed: Sequence[Prediction], situation: Situation, rates: Rates) -> str:
    others = ", ".join(f"{each.name} {each.seconds:.3g} s" for each in allowed if each is not best)
    against = f" against {others}" if others else ", the only way that may run"
    what = (
        f"{len(situation.tiles)} tiles" if best.strategy in ("tile", "hybrid")
        else f"{math.ceil(situation.shape_lat[0] / situation.ranks)} of {situation.shape_lat[0]} latent rows a rank"
        if best.strategy == "shard" else "on every rank"
    )  # fmt: skip
    return f"{best.name}, {what}, predicted {best.seconds:.3g} s{against} ({rates.source})"
