"""`--svg`: what the figure of a plan shows, and that a browser lays it out with nothing on top of anything else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from headless import Browser
from hypothesis import given
from hypothesis import strategies as st

from halotile.cli.figure import BY, figure_of, ink_on, rank_colour, shared_runs
from halotile.cli.files import write_text
from halotile.errors import PlanError
from halotile.geometry import TileGrid, tile_by_loop
from halotile.planning import TilePlan, price

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[1] / "docs"


def plan_of(
    shape: tuple[int, int], window: tuple[int, int], stride: tuple[int, int], ranks: int, **more: Any
) -> TilePlan:
    """A plan of windows and strides in latents, 8 pixels each."""
    cut = [(n, w, w if w >= n else s) for n, w, s in zip(shape, window, stride, strict=True)]
    grid = TileGrid(tuple(tile_by_loop(*axis) for axis in cut))
    tall, wide = ((w - s) * 8 for _, w, s in cut)
    return price(grid, 8, ranks, window_px=(window[0] * 8, window[1] * 8), overlap_px=(tall, wide), **more)


def worked_example() -> list[TilePlan]:
    return [
        plan_of((128, 128), (43, 128), (32, 128), 4, name="coarse"),
        plan_of((128, 128), (54, 37), (45, 28), 4, name="fine"),
    ]


MANY = plan_of((256, 256), (24, 24), (16, 16), 64, name="fine", frames=9, time=tile_by_loop(9, 4, 3))
FIGURES = {
    "worked example": worked_example(),
    "landscape, three": [
        plan_of((270, 480), window, stride, 8, frames=21, predicted_bytes=12 << 30)
        for window, stride in (((270, 160), (270, 110)), ((80, 100), (60, 70)), ((64, 64), (48, 48)))
    ],
    "portrait, thin": [plan_of((240, 60), (60, 60), (45, 60), 4)],
    "portrait, 13 ranks": [plan_of((240, 96), (60, 60), (40, 40), 13)],
    "256 tiles, 64 ranks, chunks": [MANY],
    "one tile, idle ranks": [plan_of((16, 16), (16, 16), (16, 16), 3)],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_readable_in_a_browser(browser: Browser, tmp_path: Path, name: str) -> None:
    """No two texts touch, none is smaller than seven pixels, and all are inside the sheet."""
    path = tmp_path / "plan.svg"
    write_text(path, figure_of(FIGURES[name], "AutoencoderKLHunyuanImageRefiner"))
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', path.read_text("utf-8"))[0])
    browser.open(path, size=(width, height))
    boxes = browser.js(
        "[...document.querySelectorAll('text')].map(t => { const b = t.getBoundingClientRect();"
        " return [t.textContent, b.left, b.top, b.right, b.bottom, parseFloat(t.getAttribute('font-size'))]; })"
    )
    assert len(boxes) > 8
    for words, left, top, right, bottom, size in boxes:
        assert size >= 7, words
        assert left >= 8, words
        assert top >= 8, words
        assert right <= width - 8, words
        assert bottom <= height - 8, words
    # a text's box has room above and below the letters, so boxes are made a little lower
    lower = [(words, x0, y0 + 0.2 * (y1 - y0), x1, y1 - 0.2 * (y1 - y0)) for words, x0, y0, x1, y1, _ in boxes]
    for i, (one, a0, b0, a1, b1) in enumerate(lower):
        for other, c0, d0, c1, d1 in lower[i + 1 :]:
            assert a1 <= c0 or c1 <= a0 or b1 <= d0 or d1 <= b0, (one, other)


@pytest.mark.parametrize("name", FIGURES)
def test_tiles_partition_the_picture_in_their_ranks_colours(name: str) -> None:
    plans = FIGURES[name]
    root = ElementTree.fromstring(figure_of(plans, "x"))
    panels = root.findall(f"{SVG}g[@class='panel']")
    assert len(panels) == len(plans)
    for panel, plan in zip(panels, plans, strict=True):
        group = panel.find(f"{SVG}g[@class='tiles']")
        assert group is not None
        tiles = [rect for rect in group.findall(f"{SVG}rect") if rect.get("class") is None]
        height, width = plan.grid.lengths
        scale = min(380 / width, 420 / height)
        area = Counter[str]()
        for rect in tiles:
            across, down = (round(float(rect.attrib[side]) / scale) for side in ("width", "height"))
            area[rect.attrib["fill"]] += across * down
        wanted = Counter[str]()
        for tile, owner in zip(plan.grid.tiles, plan.owners, strict=False):  # of the first chunk
            own = plan.grid.core(tile)
            wanted[rank_colour(owner)] += len(own[0]) * len(own[1])
        assert area == wanted
        assert sum(wanted.values()) == height * width


def test_bars_are_as_high_as_loads() -> None:
    plan = worked_example()[0]
    root = ElementTree.fromstring(figure_of([plan], "x"))
    bars = [float(bar.attrib["height"]) for bar in root.iter(f"{SVG}rect") if bar.get("class") == "load"]
    assert [bar / max(bars) for bar in bars] == pytest.approx([load / plan.heaviest for load in plan.loads], abs=1e-3)


@given(length=st.integers(1, 60), tile=st.integers(1, 70), stride=st.integers(1, 70))
def test_shared_runs_are_the_cells_of_several_tiles(length: int, tile: int, stride: int) -> None:
    dim = tile_by_loop(length, tile, min(tile, stride))
    times = Counter(cell for region in dim.tiles for cell in range(region.start, region.stop))
    runs = shared_runs(dim)
    assert [cell for start, stop in runs for cell in range(start, stop)] == [c for c in range(length) if times[c] > 1]
    assert all(before[1] < after[0] for before, after in pairwise(runs))


def test_numbers_are_in_the_caption() -> None:
    text = figure_of(worked_example(), "AutoencoderKL")
    for words in (
        "4 x 1 = 4 tiles, 3 seams", "33.6 % of the latent", "1.26 times", "6.8 % above",
        "3 x 5 = 15 tiles, 22 seams", "12.2 % of the latent", "1.46 times", "0.4 % above",
        "window 432 x 296 px, overlap 72 x 72 px", "1024 x 1024 px (128 x 128 latents), 4 ranks",
    ):  # fmt: skip
        assert words.replace(" x ", BY) in text
    assert "1 tile, 0 seams" in figure_of(FIGURES["one tile, idle ranks"], "x")
    assert "2 ranks idle" in figure_of(FIGURES["one tile, idle ranks"], "x")


def test_same_plans_same_bytes_and_any_title() -> None:
    title = '</title><script>alert(1)</script> & "quotes" \' ]]>'
    text = figure_of(worked_example(), title)
    assert text == figure_of(worked_example(), title)
    root = ElementTree.fromstring(text)
    assert not list(root.iter(f"{SVG}script"))
    assert root.findtext(f"{SVG}title", "").startswith(title)


def test_colours_of_ranks_differ_and_carry_their_numbers() -> None:
    colours = [rank_colour(rank) for rank in range(64)]
    assert len(set(colours)) == 64
    for colour in colours:
        high, low = sorted((_light(colour), _light(ink_on(colour))), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4, colour


def test_docs_show_the_worked_example() -> None:
    """Made by `figure_of` of these plans; when the drawing changes, write and look at it again."""
    assert (DOCS / "plan.svg").read_text("utf-8") == figure_of(worked_example(), "AutoencoderKL")


def test_plans_of_no_or_two_pictures_are_refused() -> None:
    with pytest.raises(PlanError, match="0 plans"):
        figure_of([], "x")
    with pytest.raises(PlanError, match="2 pictures"):
        figure_of([MANY, *worked_example()], "x")


def _light(colour: str) -> float:
    """Relative luminance, WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
