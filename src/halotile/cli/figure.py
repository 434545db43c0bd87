"""`--svg`: each plan's tiles over the picture in the colours of their ranks, and a bar of each rank's load.

Plain SVG: no font, no picture and no script in it, and the same bytes for the same plans.
"""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from xml.etree import ElementTree

from halotile.cli.panels import RANK_COLOURS
from halotile.errors import PlanError
from halotile.geometry.tiling import DimTiling
from halotile.planning import TilePlan

Element = ElementTree.Element
Rect = tuple[float, float, float, float]  # left, top, width, height

PANEL_W, PICTURE_H, BARS_H, GAP, MARGIN = 380, 420, 70, 40, 28
LINE_H = 19
PAPER, INK, FAINT = "#fafaf8", "#1e1e1e", "#66665f"
BY = " \N{MULTIPLICATION SIGN} "
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def figure_of(plans: Sequence[TilePlan], title: str) -> str:
    """The SVG text: the plans beside each other, all of one picture.

    A panel has the tiles over the picture, hatched where several decode the same cells, a bar a rank and the costs in
    words. `title` says what was planned for, such as the VAE's class; picture and ranks are added to it. Raises
    `PlanError` when there is no plan or the plans are of different pictures.
    """
    height, width, ratio = one_picture(plans)
    sizes = f"{height * ratio}{BY}{width * ratio} px ({height}{BY}{width} latents)"
    frames = f", {plans[0].frames} latent frames" if plans[0].frames > 1 else ""
    headline = f"{title}: {sizes}{frames}, {_count(plans[0].ranks, 'rank')}"
    sheet_w = 2 * MARGIN + len(plans) * PANEL_W + (len(plans) - 1) * GAP
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": FONT})
    _sub(root, "title").text = headline
    _hatch(root)
    paper = _sub(root, "rect", width="100%", height="100%", fill=PAPER)
    top = float(MARGIN)
    # a size is not parted: textwrap breaks at plain spaces alone
    joined = headline.replace(sizes, sizes.replace(" ", "\N{NO-BREAK SPACE}").replace("px\N{NO-BREAK SPACE}", "px "))
    for line in textwrap.wrap(joined, int((sheet_w - 2 * MARGIN) / 11.5)):
        top += 22
        _text(root, MARGIN, top, line.replace("\N{NO-BREAK SPACE}", " "), size=18, weight="600")
    top += 34
    scale = min(PANEL_W / width, PICTURE_H / height)
    bottoms = [_panel(root, plan, MARGIN + i * (PANEL_W + GAP), top, scale) for i, plan in enumerate(plans)]
    bottom = _legend(root, max(bottoms) + 16, len(plans))
    size = (sheet_w, round(bottom + MARGIN - 8))
    root.set("viewBox", f"0 0 {size[0]} {size[1]}")
    root.set("width", str(size[0]))
    root.set("height", str(size[1]))
    paper.set("width", str(size[0]))
    paper.set("height", str(size[1]))
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def one_picture(plans: Sequence[TilePlan]) -> tuple[int, int, int]:
    """Height and width in latents and the pixels a latent, the same for all plans; raises `PlanError` if not."""
    pictures = {(*plan.grid.lengths, plan.ratio) for plan in plans}
    if len(pictures) != 1:
        raise PlanError(f"what is shown are plans of one picture, got {len(plans)} plans of {len(pictures)} pictures")
    height, width, ratio = pictures.pop()
    return height, width, ratio


def rank_colour(rank: int) -> str:
    """A rank's colour: a palette that colour-blind eyes tell apart, then hues a golden angle apart, light and dark."""
    if rank < len(RANK_COLOURS):
        return "#{:02x}{:02x}{:02x}".format(*RANK_COLOURS[rank])
    hue = (rank * 0.61803398875 + 0.35) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.42, 0.58, 0.74)[rank % 3], (0.45, 0.62)[rank % 2])
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def ink_on(colour: str) -> str:
    """Dark or white, whichever has the better contrast (WCAG 2) on a colour."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return INK if (light + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def caption_of(plan: TilePlan) -> list[str]:
    """The costs of a plan, a line a thing."""
    idle = f", {_count(plan.idle_ranks, 'rank')} idle" if plan.idle_ranks else ""
    lines = [
        f"{plan.rows}{BY}{plan.columns} = {_count(plan.tiles, 'tile')}, {_count(plan.seams, 'seam')}",
        f"one window holds {float(plan.window_share):.1%} of the latent",
        f"tiles decode {float(plan.decoded_ratio):.2f} times the latent",
        f"heaviest rank {float(plan.imbalance):.1%} above an even split{idle}",
    ]
    if plan.chunks > 1:
        lines.append(f"{plan.chunks} chunks of frames, each with all tiles; the first is shown")
    if plan.predicted_bytes is not None:
        lines.append(f"about {plan.predicted_bytes / 2**30:.2f} GiB of activations predicted")
    return [line.replace("%", " %") for line in lines]


def _panel(root: Element, plan: TilePlan, left: float, top: float, scale: float) -> float:
    """Draw one plan; returns where it ends."""
    panel = _sub(root, "g", **{"class": "panel"})
    window, overlap = (f"{size[0]}{BY}{size[1]}" for size in (plan.window_px, plan.overlap_px))
    _text(panel, left, top, plan.name, size=16, weight="600")
    _text(panel, left, top + LINE_H, f"window {window} px, overlap {overlap} px", size=13)
    top += LINE_H + 14
    _tiles(panel, plan, left, top, scale)
    top += plan.grid.lengths[0] * scale + 24
    _bars(panel, plan, left, top)
    top += BARS_H + 68
    for line in caption_of(plan):
        _text(panel, left, top, line, size=13)
        top += LINE_H
    return top


def _tiles(panel: Element, plan: TilePlan, left: float, top: float, scale: float) -> None:
    """Each tile's own region in its rank's colour, what several tiles decode hatched, the first window outlined."""
    group = _sub(panel, "g", transform=f"translate({_num(left)} {_num(top)})", **{"class": "tiles"})
    rows, columns = plan.grid.dims
    labels = []
    for tile in range(rows.count * columns.count):
        rank = plan.owners[tile]
        across, down = columns.cores[tile % columns.count], rows.cores[tile // columns.count]
        box = (across.start * scale, down.start * scale, len(across) * scale, len(down) * scale)
        _rect(group, box, fill=rank_colour(rank), stroke=PAPER, **{"stroke-width": "1"})
        labels.append((rank, box))
    shared = [(0.0, a * scale, columns.length * scale, (b - a) * scale) for a, b in shared_runs(rows)]
    shared += [(a * scale, 0.0, (b - a) * scale, rows.length * scale) for a, b in shared_runs(columns)]
    # one path, so that crossings are hatched once
    path = "".join(f"M{_num(x)} {_num(y)}h{_num(w)}v{_num(h)}h{_num(-w)}z" for x, y, w, h in shared)
    if path:
        _sub(group, "path", d=path, fill="url(#shared)", **{"class": "shared"})
    one = (0.0, 0.0, len(columns.tiles[0]) * scale, len(rows.tiles[0]) * scale)
    _rect(group, one, fill="none", stroke=INK, **{"stroke-width": "2.5", "class": "window"})
    for rank, (x, y, w, h) in labels:
        size = min(13.0, h * 0.7, w * 0.8 / len(str(rank)))
        if size >= 7:
            label = _text(group, x + w / 2, y + h / 2 + size * 0.36, str(rank), size=size, anchor="middle")
            colour = rank_colour(rank)
            label.attrib |= {"fill": ink_on(colour), "stroke": colour, "stroke-width": "4", "paint-order": "stroke"}


def _bars(panel: Element, plan: TilePlan, left: float, top: float) -> None:
    """A bar a rank, as high as its load is against the heaviest, and a line at the even split."""
    group = _sub(panel, "g", **{"class": "loads"})
    heaviest, step = max(plan.loads), PANEL_W / plan.ranks
    numbers, floor = top + 22, top + 28 + BARS_H
    gap = min(8.0, step * 0.2)
    times = f"{BY}frames" if plan.frames > 1 else ""
    every = max(1, round(0.5 + 22 / step))  # as many rank numbers as fit
    _text(group, left, top, f"load of each rank in latent cells{times}; dashes: an even split", size=12, fill=FAINT)
    for rank, load in enumerate(plan.loads):
        x, height = left + rank * step, BARS_H * load / heaviest
        _rect(group, (x + gap / 2, floor - height, step - gap, height), fill=rank_colour(rank), **{"class": "load"})
        if step >= 7 * len(str(heaviest)) + 4:
            # all in one line above the highest bar, where no other line crosses them
            _text(group, x + step / 2, numbers, str(load), size=11, anchor="middle")
        if rank % every == 0:
            _text(group, x + step / 2, floor + 14, str(rank), size=11, anchor="middle")
    even = floor - BARS_H * sum(plan.loads) / (plan.ranks * heaviest)
    line = {"x1": left, "x2": left + PANEL_W, "y1": even, "y2": even}
    _sub(group, "line", **{key: _num(value) for key, value in line.items()}, stroke=INK, **{"stroke-dasharray": "5 3"})


def _legend(root: Element, top: float, columns: int) -> float:
    """What the marks mean; returns where it ends."""
    entries = ("number and colour: the tile's rank", "hatched: several tiles decode it", "outlined: the first window")
    _text(root, MARGIN, top + 12, f"All sizes are height{BY}width.", size=12)
    top += LINE_H + 4
    for i, words in enumerate(entries):
        x, y = MARGIN + i % columns * (PANEL_W + GAP), top + i // columns * (LINE_H + 4)
        box = (x, y, 26.0, 15.0)
        if i < 2:
            _rect(root, box, fill=rank_colour(i))
        if i > 0:
            look = {"fill": "url(#shared)"} if i == 1 else {"fill": "none", "stroke": INK, "stroke-width": "2"}
            _rect(root, box, **look)
        _text(root, x + 34, y + 12, words, size=12)
    return top + -(-len(entries) // columns) * (LINE_H + 4)


def shared_runs(dim: DimTiling) -> list[tuple[int, int]]:
    """The runs of cells of one dim that more than one tile decodes, in order, none touching the next."""
    runs: list[tuple[int, int]] = []
    for tile, after in pairwise(dim.tiles):
        if after.start >= tile.stop:
            continue
        if runs and after.start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], tile.stop))
        else:
            runs.append((after.start, tile.stop))
    return runs


def _hatch(root: Element) -> None:
    pattern = _sub(
        _sub(root, "defs"), "pattern", id="shared", width="6", height="6",
        patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
    )  # fmt: skip
    _sub(pattern, "line", x1="0", x2="0", y1="0", y2="6", stroke=INK, **{"stroke-width": "2", "stroke-opacity": "0.55"})


def _sub(parent: Element, kind: str, **attributes: str) -> Element:
    return ElementTree.SubElement(parent, kind, attributes)


def _rect(parent: Element, box: Rect, **attributes: str) -> Element:
    x, y, width, height = map(_num, box)
    return _sub(parent, "rect", x=x, y=y, width=width, height=height, **attributes)


def _text(
    parent: Element, x: float, y: float, words: str, *, size: float, weight: str = "400", anchor: str = "start",
    fill: str = INK,
) -> Element:  # fmt: skip
    out = _sub(parent, "text", x=_num(x), y=_num(y), fill=fill)
    out.attrib |= {"font-size": _num(size), "font-weight": weight, "text-anchor": anchor}
    out.text = words
    return out


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _num(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
