"""The demo's picture: originals beside what was decoded, each tile's border in the colour of its rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from halotile.cli.files import staged
from halotile.cli.media import to_bytes
from halotile.families import family_of
from halotile.planning import deal

PANEL_PX, MARGIN_PX, CAPTION_PX, BORDER_PX = 960, 24, 34, 4
PAPER, INK = (250, 250, 248), (30, 30, 30)
# Okabe and Ito's palette, told apart by colour-blind eyes too
RANK_COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)


@dataclass(frozen=True)
class Tile:
    """A tile's box in pixels (left, top, right, bottom) and the rank that decoded it."""

    box: tuple[int, int, int, int]
    rank: int


@dataclass(frozen=True)
class Panel:
    """One row of the picture."""

    original: Image.Image
    decoded: Image.Image
    tiles: tuple[Tile, ...]
    captions: tuple[str, str]


def tiles_of(vae: Any, latents: Tensor, ranks: int) -> tuple[Tile, ...]:
    """The tiles of the VAE's own loop over `latents` (`B C [F] H W`), row by row as the loop meets them."""
    family = family_of(vae)
    assert family is not None, "the demo's VAEs have a row"
    ratio = family.ratio(vae)
    rows, columns = family.layout.axes(vae, "decode", latents.shape[-2], latents.shape[-1], ratio)
    spans = [
        (top, left, min(top + rows.window, rows.length), min(left + columns.window, columns.length))
        for top in rows.starts
        for left in columns.starts
    ]
    owners = deal([(bottom - top) * (right - left) for top, left, bottom, right in spans], ranks)
    boxes = [(left * ratio, top * ratio, right * ratio, bottom * ratio) for top, left, bottom, right in spans]
    return tuple(Tile(box, rank) for box, rank in zip(boxes, owners, strict=True))


def picture_of(pixels: Tensor) -> Image.Image:
    """The picture of `1 3 H W`, the middle frame of `1 3 F H W`."""
    flat = pixels if pixels.dim() == 4 else pixels[:, :, pixels.shape[2] // 2]
    return Image.fromarray(to_bytes(flat[0].permute(1, 2, 0).cpu()))


def write_side_by_side(path: Path, panels: list[Panel]) -> None:
    """Write the panels under each other as a PNG."""
    drawn = [_draw(panel) for panel in panels]
    sheet = Image.new("RGB", (drawn[0].width, sum(each.height for each in drawn)), PAPER)
    top = 0
    for each in drawn:
        sheet.paste(each, (0, top))
        top += each.height
    with staged(path) as part:
        sheet.save(part, format="PNG")


def _draw(panel: Panel) -> Image.Image:
    scale = PANEL_PX / panel.original.width
    size = (PANEL_PX, round(panel.original.height * scale))
    row = Image.new("RGB", (2 * PANEL_PX + 3 * MARGIN_PX, size[1] + 2 * MARGIN_PX + CAPTION_PX), PAPER)
    pen = ImageDraw.Draw(row)
    font = ImageFont.load_default(22)
    for column, picture in enumerate((panel.original, panel.decoded)):
        left, top = MARGIN_PX + column * (PANEL_PX + MARGIN_PX), MARGIN_PX + CAPTION_PX
        pen.text((left, MARGIN_PX), panel.captions[column], fill=INK, font=font)
        row.paste(picture.resize(size, Image.Resampling.LANCZOS), (left, top))
        if column == 1:
            _draw_tiles(pen, panel.tiles, scale, left, top)
    return row


def _draw_tiles(pen: ImageDraw.ImageDraw, tiles: tuple[Tile, ...], scale: float, left: int, top: int) -> None:
    """Each border a little inside its box, so that the borders of overlapping neighbours can be told apart."""
    font = ImageFont.load_default(18)
    for tile in tiles:
        colour = RANK_COLOURS[tile.rank % len(RANK_COLOURS)]
        x0, y0, x1, y1 = (round(edge * scale) for edge in tile.box)
        inside = (left + x0 + 2, top + y0 + 2, left + x1 - 3, top + y1 - 3)
        if inside[2] - inside[0] <= BORDER_PX or inside[3] - inside[1] <= BORDER_PX:
            continue
        pen.rectangle(inside, outline=colour, width=BORDER_PX)
        label = f"rank {tile.rank}"
        place = (inside[0] + BORDER_PX + 4, inside[1] + BORDER_PX + 2)
        pen.rectangle(pen.textbbox(place, label, font=font), fill=colour)
        pen.text(place, label, fill=INK, font=font)
