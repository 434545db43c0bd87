"""Write docs/families.md: what halotile can do with every autoencoder class of diffusers, from a test run.

    python tools/families_report.py [--out docs/families.md] [--kinds NAME ...]

Each kind of tests/tiny_vaes.py and tests/more_vaes.py decodes and encodes on one rank, and with its activations sharded
over two and three gloo ranks; its own tile loop runs through halotile where it has one. Takes some minutes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import more_vaes as more  # noqa: E402
import ranks  # noqa: E402
import sharded  # noqa: E402
from first_difference import Difference, first_difference  # noqa: E402

import halotile  # noqa: E402
from halotile.errors import HalotileError, UnsupportedError  # noqa: E402
from halotile.families import FAMILIES, set_window  # noqa: E402

GATHERS = {
    ("VQModel", "aten._euclidean_dist.default"): "the quantizer compares every latent with the whole codebook",
    ("AutoencoderKLMiniMaxH3", "aten.slice.Tensor"): "a transformer over frames x height x width as one dim of tokens",
    ("AutoencoderKLMiniMaxH3", "aten.cat.default"): "register tokens are joined to those of frames x height x width",
}
"""(kind, operation) -> why the operation gathers there"""

ROUNDS = {
    "GroupNorm": "sums over rows are merged across ranks, in another order than one rank's",
    "Norm, over channels": "a sum over channels takes the columns that the vector width leaves over in another order, "
    "and a band has others than the whole; bitwise equal at widths that the vector width divides",
    "Conv or Linear": "the kernel rounds a band in another way than the whole, at these small sizes; "
    "not looked into further",
    "between modules": "an operation that is no module: an attention, a mean over channels",
}
"""what rounds -> why its result may differ in the last bits"""


@dataclass
class Row:
    """One kind, one half. `errors`: ranks -> largest error over the largest value. `why`: a reason for each gap."""

    kind: str
    half: str
    tile: bool = False
    shard: bool = True
    gathers: dict[str, int] = field(default_factory=dict)
    attention: int = 0
    errors: dict[int, float] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)


def main() -> None:
    """Parse the command line, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "families.md")
    parser.add_argument("--kinds", nargs="+", choices=list(sharded.KINDS), default=list(sharded.KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows = []
    for kind, half in sharded.cases(args.kinds):
        started = time.perf_counter()
        rows.append(measure(kind, half))
        print(f"{rows[-1]} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    args.out.write_text("\n".join(page(rows)) + "\n")


def measure(kind: str, half: str) -> Row:
    """Run one kind, one half, every way."""
    row = Row(kind, half)
    refusal = try_tiles(kind, half)
    row.tile = refusal is None
    if refusal is not None:
        row.why.append(f"tile: {refusal}")
    whole = sharded.alone(kind, half)
    for n in (2, 3):
        try:
            results = sharded.run(kind, half, n)
        except (HalotileError, ranks.RankFailure) as error:
            row.shard = False
            row.why.append(f"shard: {str(error).strip().splitlines()[-1]}")
            return row
        row.errors[n] = max(sharded.relative_error(result, whole) for result, _ in results)
        if n == 2:
            row.gathers, row.attention = results[0][1].gathers, results[0][1].attention_gathers
    row.why += [f"`{name}`: {GATHERS.get((kind, name), 'has no rule for sharded rows here')}" for name in row.gathers]
    if any(row.errors.values()):
        row.why.append(rounding(first_difference(kind, half)))
    return row


def try_tiles(kind: str, half: str) -> str | None:
    """Run the class's own tile loop through halotile on several tiles, one rank. Returns why that is refused, or None.

    That it is bitwise equal on more ranks is what tests/test_tile_families.py shows.
    """
    vae, ratio = sharded.build(kind), sharded.KINDS[kind][3]
    if type(vae).__name__ in FAMILIES:
        set_window(vae, 6 * ratio, 4 * ratio)
    x = sharded.make_input(kind, half, height=10, width=7)
    try:
        with torch.no_grad(), halotile.parallelize(vae, halotile.Ranks.alone(), strategy="tile", halves=(half,)):
            sharded.call(vae, kind, half, x)
    except UnsupportedError as error:
        return str(error).split(": ", 1)[-1]
    except HalotileError as error:
        return f"its own loop fails on a window of 6 latents every 4: {error}"
    return None


def rounding(difference: Difference | None) -> str:
    """Where a result that is not bitwise equal begins to differ."""
    if difference is None:
        return "rounds outside its modules"
    where = f"`{difference.module}`, {difference.kind} of {' x '.join(map(str, difference.shape))}"
    return f"rounds between modules, before {where}" if difference.before else f"rounds from {where}"


def page(rows: list[Row]) -> Iterator[str]:
    """The lines of the page."""
    yield "# What works with which autoencoder"
    yield ""
    yield (
        f"Generated by `python tools/families_report.py`, not by hand; halotile {halotile.__version__}, diffusers "
        f"{diffusers.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU, float32."
    )
    yield ""
    yield (
        'Every kind runs with `strategy="serial"`. *tile*: its own tile loop can be shared. *shard*: one decode or '
        "encode with activations cut into rows; *gathers* names operations that gathered a whole tensor on two ranks, "
        "*keys* counts the gathers of an attention's keys and values. *error* is the largest one over the largest "
        "value, on two / three ranks, against one rank; 0 is bitwise equal. Tiny random-weight models with the block "
        "types of the released ones, 11 latents high."
    )
    yield ""
    yield "*why* has the reason of each gap; of a result that is not bitwise equal, the first module that rounds:"
    yield ""
    for what, why in ROUNDS.items():
        yield f"* {what}: {why}"
    for half in sharded.HALVES:
        yield from ("", f"## {half}", "")
        yield "| class | kind | tile | shard | gathers | keys | error, 2 / 3 ranks | why |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
        for row in sorted(
            (row for row in rows if row.half == half), key=lambda row: (sharded.KINDS[row.kind][0], row.kind)
        ):
            yield cells(row)
    yield from ("", "## Without a kind of its own", "")
    yield "| class | why |"
    yield "| --- | --- |"
    for name, why in sorted(more.WITHOUT_KIND.items()):
        yield f"| {name} | {why} |"


def cells(row: Row) -> str:
    """One line of a table."""
    gathers = ", ".join(f"`{name}`: {count}" for name, count in row.gathers.items()) or "none"
    measured = [gathers, str(row.attention), " / ".join(f"{e:.1e}" if e else "0" for e in row.errors.values())]
    marks = ["yes" if works else "no" for works in (row.tile, row.shard)]
    name = sharded.KINDS[row.kind][0]
    kind = row.kind.removeprefix(name).lstrip("_")
    why = "; ".join(row.why).replace("|", "\\|")
    return "| " + " | ".join([name, kind, *marks, *(measured if row.shard else ["", "", ""]), why]) + " |"


if __name__ == "__main__":
    main()
