"""Sharded decode and encode of the classes of more_vaes.py, and the page that lists what works with which class."""

from __future__ import annotations

import re
from pathlib import Path

import more_vaes as more
import pytest
import sharded
import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"

# operations that gather a whole tensor; no other kind has any but for an attention's keys and values
GATHERS = {("VQModel", "decode"): {"aten._euclidean_dist.default": 1}}


@pytest.mark.parametrize(("name", "half"), sharded.cases(more.CONFIGS))
def test_two_ranks_give_one_ranks_result_without_unknown_gathers(name: str, half: str) -> None:
    expected = sharded.alone(name, half)
    results = sharded.run(name, half, 2)
    for out, report in results:
        assert out.dtype == expected.dtype
        assert sharded.relative_error(out, expected) <= sharded.TOLERANCE
        assert torch.equal(out, results[0][0]), "the ranks hold different results"
        assert report.strategy == "shard"
        assert report.gathers == GATHERS.get((name, half), {})


def test_every_class_of_diffusers_has_a_kind_or_a_reason() -> None:
    with_kind = {config[0] for config in sharded.KINDS.values()}
    assert with_kind | set(more.WITHOUT_KIND) == set(sharded.exported_classes())
    assert not with_kind & set(more.WITHOUT_KIND)


def test_the_page_lists_every_class_and_every_kind() -> None:
    # written by `python tools/families_report.py`
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    listed = {row[0] for row in rows}
    missing = set(sharded.exported_classes()) - listed
    assert not missing, f"run python tools/families_report.py: {sorted(missing)} are not in {PAGE.name}"
    for name, (cls, *_) in sharded.KINDS.items():
        kind = name.removeprefix(cls).lstrip("_")
        assert any(row[:2] == [cls, kind] for row in rows), f"run python tools/families_report.py: no row of {name}"


def test_the_page_was_made_with_the_installed_diffusers() -> None:
    import diffusers

    found = re.search(r"diffusers ([\d.]+\d)", PAGE.read_text())
    assert found is not None
    assert found[1] == diffusers.__version__, "run python tools/families_report.py"


def test_the_class_without_an_untiled_call_says_so_itself() -> None:
    import diffusers

    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    with pytest.raises(NotImplementedError, match="without tiling"):
        vae.decode(torch.zeros(1, 4, 2, 4, 4))
