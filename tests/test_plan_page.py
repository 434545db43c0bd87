"""`--html`: the page in a real headless browser; its numbers are the library's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from headless import Browser
from test_plan_figure import plan_of, worked_example

from halotile.cli.figure import shared_runs
from halotile.cli.files import write_text
from halotile.cli.page import page_of
from halotile.errors import PlanError
from halotile.families import AxisLoop
from halotile.geometry import DimTiling, Interval, TileGrid, tile_by_loop
from halotile.planning import SCHEDULERS, price
from halotile.planning.pack import STEPS

COSTS = (
    "rows", "columns", "tiles", "chunks", "window_share", "decoded_ratio", "seams", "loads", "imbalance", "idle_ranks",
    "owners", "window_px", "overlap_px", "ranks",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    """The worked example's page, the window of 54 x 37 latents shown."""
    path = tmp_path / "plan.html"
    write_text(path, page_of(worked_example()[::-1], "AutoencoderKL", least_window_px=(128, 128), multiple_px=(16, 8)))
    browser.open(path)
    return browser


def test_hundreds_of_random_requests_cost_what_the_library_says(page: Browser) -> None:
    """Equal to the last bit: integers, owners, and fractions as the floats of `to_dict`."""
    chance = random.Random(4)
    requests, wanted, grids = zip(*(_random_request(chance) for _ in range(300)), strict=True)
    told = page.js(f"{list(requests)}.map((request) => halotilePrice(request))")
    for request, costs, plan, grid in zip(requests, told, wanted, grids, strict=True):
        assert costs["axes"] == [[[tile.start, tile.stop] for tile in dim.tiles] for dim in grid.dims], request
        assert {name: costs[name] for name in COSTS} == {name: plan[name] for name in COSTS}, request
    assert page.js("STEPS") == STEPS
    # what the picture is drawn from: each tile's own cells, and those of several tiles
    drawn = page.js(f"{list(requests)}.map((r) => halotilePrice(r).axes.map((a) => [coresOf(a), sharedRuns(a)]))")
    for axes, grid in zip(drawn, grids, strict=True):
        for (cores, runs), dim in zip(axes, grid.dims, strict=True):
            assert cores == [[core.start, core.stop] for core in dim.cores]
            told_cells = {cell for start, stop in runs for cell in range(start, stop)}
            assert told_cells == {cell for start, stop in shared_runs(dim) for cell in range(start, stop)}
    # the requests reach what the port of the scheduler has to get right
    assert sum(plan["imbalance"] > 0 for plan in wanted) > 50
    assert sum(plan["idle_ranks"] > 0 for plan in wanted) > 3
    assert sum(plan["chunks"] > 1 for plan in wanted) > 10
    assert max(plan["tiles"] for plan in wanted) > 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overlap_px": [432, 72]}, "overlap 54 does not fit window 54"),
        ({"window_px": [432, 1024]}, "overlap 9 does not fit window 128 on 128"),
        ({"window_px": [430, 296]}, "whole latents"),
        ({"ranks": 0}, "does not fit"),
        ({"last": "drop"}, "only whole tiles"),
    ],
)
def test_requests_that_cannot_be_are_refused(page: Browser, change: dict[str, Any], words: str) -> None:
    request = _worked_request() | change
    with pytest.raises(RuntimeError, match=words):
        page.js(f"halotilePrice({request})")


def test_page_shows_the_worked_example(page: Browser) -> None:
    assert _shown(page) == ["3 x 5 = 15", "12.2 %", "1.46", "22", "0.4 %", "0"]
    assert page.js("document.getElementById('options').textContent") == "--window 432x296 --overlap 72x72 --ranks 4"
    page.js("document.querySelectorAll('#plans button')[1].click()")
    assert _shown(page) == ["4 x 1 = 4", "33.6 %", "1.26", "3", "6.8 %", "0"]
    assert page.js("document.getElementById('overlap-width').disabled")


def test_dragging_the_handles_changes_the_costs(page: Browser) -> None:
    before = _asked(page)
    px = 1024 / _box(page, "picture")[2]  # of the picture, a pixel of the screen
    _drag_handle(page, "drag-window", by=(120, 90))
    grown = _asked(page)
    assert grown[:2] == pytest.approx((before[0] + 90 * px, before[1] + 120 * px), abs=17)
    assert grown[0] % 16 == 0, "height moves in steps of multiple_px"
    assert grown[2:] == before[2:]
    _check_shown(page, ranks=4)
    _drag_handle(page, "drag-overlap-height", by=(0, -50))
    _drag_handle(page, "drag-overlap-width", by=(-40, 0))
    wider = _asked(page)
    assert wider[:2] == grown[:2]
    assert wider[2:] == pytest.approx((grown[2] + 50 * px, grown[3] + 40 * px), abs=17)
    _check_shown(page, ranks=4)
    _drag_handle(page, "drag-window", by=(-2000, -2000))
    assert _asked(page)[:2] == (128, 128), "no window below least_window_px"
    _check_shown(page, ranks=4)


def test_sliders_change_the_costs(page: Browser) -> None:
    seen = [_asked(page)]
    for name in ("window-height", "window-width", "overlap-height", "overlap-width"):
        _drag_slider(page, name, 0.6)
        seen.append(_asked(page))
    assert [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in pairwise(seen)] == [1] * 4
    _check_shown(page, ranks=4)
    _drag_slider(page, "ranks", 0.2)
    ranks = int(page.js("document.getElementById('ranks').value"))
    assert 8 < ranks < 20
    _check_shown(page, ranks=ranks)
    assert page.js("document.querySelectorAll('#loads path').length") == ranks + 1
    # a window that clears both axes is one tile, which has nothing to overlap with
    _drag_slider(page, "window-height", 1.0)
    _drag_slider(page, "window-width", 1.0)
    assert _asked(page) == (1024, 1024, 0, 0)
    assert _shown(page) == ["1 x 1 = 1", "100.0 %", "1.00", "0", f"{100 * (ranks - 1):.1f} %", str(ranks - 1)]


def test_a_window_that_cannot_be_is_said(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_text(path, page_of([plan_of((128, 128), (64, 64), (32, 32), 2)], "x", last="drop"))
    browser.open(path)
    shown = _shown(browser)
    browser.js(
        "(document.getElementById('window-height').stepUp(),"
        " document.getElementById('window-height').dispatchEvent(new Event('input')))"
    )
    assert "only whole tiles" in browser.js("document.getElementById('fault').textContent")
    assert _shown(browser) == shown, "the last prices stay"


@pytest.mark.parametrize(
    "title", ["</script><script>window.broken = 1</script>", "<!--<script>", "a\u2028'\"\\ & </title>"]
)
def test_no_title_breaks_out_of_the_data(browser: Browser, tmp_path: Path, title: str) -> None:
    path = tmp_path / "plan.html"
    write_text(path, page_of(worked_example(), title))
    browser.open(path)
    assert browser.js("document.getElementById('title').textContent") == title
    assert browser.js("document.scripts.length") == 3
    assert browser.js("window.broken === undefined")


def test_nothing_is_fetched(page: Browser) -> None:
    """The fence refuses what is not a file; the page has no address in it but that of SVG's namespace."""
    text = page_of(worked_example(), "x")
    assert text.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert page.js("performance.getEntriesByType('resource').length") == 0
    page.raise_errors()


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "plan.html"
    write_text(path, page_of(worked_example(), "x"))
    browser = Browser(dark=dark)
    try:
        browser.open(path)
        paper = browser.js("getComputedStyle(document.body).backgroundColor")
        inks = [browser.js(f"getComputedStyle(document.querySelector('{what}')).color") for what in ("h1", "p", "dt")]
    finally:
        browser.close()
    assert (_light(paper) < 0.2) == dark
    for ink in inks:
        high, low = sorted((_light(ink), _light(paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_no_control_is_cut_off_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_text(path, page_of(worked_example(), "AutoencoderKLHunyuanImageRefiner"))
    browser.open(path, size=(390, 800))
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("[...document.querySelectorAll('input')].every(i => i.getBoundingClientRect().width > 150)")


def test_plans_that_differ_are_refused() -> None:
    with pytest.raises(PlanError, match="0 plans"):
        page_of([], "x")
    with pytest.raises(PlanError, match="same ranks"):
        page_of([plan_of((64, 64), (32, 32), (24, 24), ranks) for ranks in (2, 3)], "x")
    with pytest.raises(PlanError, match="not dealt by"):
        page_of(worked_example(), "x", scheduler="round_robin")
    with pytest.raises(PlanError, match="multiples of 8"):
        page_of(worked_example(), "x", multiple_px=(8, 12))


def _random_request(chance: random.Random) -> tuple[dict[str, Any], dict[str, Any], TileGrid]:
    """A request as the page takes it, what the library says of it, and its tiles."""
    ratio, ranks = chance.choice([1, 4, 8, 16, 32]), chance.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 61])
    last = chance.choice(["clip", "clip", "clip", "spread", "drop"])
    latent, window, overlap, dims = [], [], [], []
    for axis in ("height", "width"):
        tile, further = chance.randint(4, 70), chance.randint(0, 12)
        stride = chance.randint(max(1, tile // 3), tile)
        length = tile + further * stride if last == "drop" else chance.randint(8, 300)
        if tile >= length:
            stride = tile
        loop = AxisLoop(axis, "decode", length, tile, stride, 0, 0, ratio, "", "", last=last)
        latent.append(length)
        window.append(tile * ratio)
        overlap.append((tile - stride) * ratio)
        dims.append(loop.tiling)
    frames, time = chance.choice([(1, None), (9, None), (9, tile_by_loop(9, 4, 3)), (7, _apart(4, 3))])
    grid = TileGrid(tuple(dims))
    asked = {"window_px": tuple(window), "overlap_px": tuple(overlap)}
    scheduler = chance.choice(["balanced", "balanced", "balanced", *SCHEDULERS])
    plan = price(grid, ratio, ranks, **asked, scheduler=scheduler, frames=frames, time=time)
    request = {
        "latent": latent,
        "ratio": ratio,
        "ranks": ranks,
        "window_px": window,
        "overlap_px": overlap,
        "last": last,
    }
    chunks = [frames] if time is None else [len(chunk) for chunk in time.tiles]
    return request | {"scheduler": scheduler, "frames": frames, "chunks": chunks}, plan.to_dict(), grid


def _apart(first: int, second: int) -> DimTiling:
    return DimTiling(first + second, (Interval(0, first), Interval(first, first + second)))


def _worked_request() -> dict[str, Any]:
    return {"latent": [128, 128], "ratio": 8, "ranks": 4, "window_px": [432, 296], "overlap_px": [72, 72]}


def _shown(page: Browser) -> list[str]:
    words: list[str] = page.js("[...document.querySelectorAll('dd')].map(dd => dd.textContent)")
    return [text.replace("\N{MULTIPLICATION SIGN}", "x") for text in words]


def _asked(page: Browser) -> tuple[int, ...]:
    """Window height and width, overlap height and width, as the page words them for the command line."""
    words: str = page.js("document.getElementById('options').textContent")
    _, window, _, overlap, _, _ = words.split()
    return tuple(int(side) for pair in (window, overlap) for side in pair.split("x"))


def _check_shown(page: Browser, ranks: int) -> None:
    """What the page shows is what the library says of the window that it shows."""
    tall, wide, over_tall, over_wide = (px // 8 for px in _asked(page))
    plan = plan_of((128, 128), (tall, wide), (tall - over_tall, wide - over_wide), ranks)
    share, ratio, above = (float(value) for value in (plan.window_share, plan.decoded_ratio, plan.imbalance))
    wanted = [
        f"{plan.rows} x {plan.columns} = {plan.tiles}", f"{share * 100:.1f} %", f"{ratio:.2f}", str(plan.seams),
        f"{above * 100:.1f} %", str(plan.idle_ranks),
    ]  # fmt: skip
    assert _shown(page) == wanted
    page.raise_errors()


def _drag_handle(page: Browser, name: str, by: tuple[int, int]) -> None:
    x, y, w, h = _box(page, name)
    page.drag((x + w / 2, y + h / 2), (x + w / 2 + by[0], y + h / 2 + by[1]))


def _drag_slider(page: Browser, name: str, to: float) -> None:
    """Drag the thumb to a part of the slider's way."""
    x, y, w, h = _box(page, name)
    low, high, value = (float(page.js(f"document.getElementById('{name}').{part}")) for part in ("min", "max", "value"))
    thumb = 16  # wide, in Chromium
    at = [x + thumb / 2 + part * (w - thumb) for part in ((value - low) / (high - low), to)]
    page.drag((at[0], y + h / 2), (at[1] + 4 * (to == 1), y + h / 2))


def _box(page: Browser, name: str) -> tuple[float, float, float, float]:
    x, y, w, h = page.js(
        f"(b => [b.x, b.y, b.width, b.height])(document.getElementById('{name}').getBoundingClientRect())"
    )
    return x, y, w, h


def _light(colour: str) -> float:
    """Relative luminance of rgb(r, g, b), WCAG 2."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
