"""`decode/footprint.py`: what a tile holds, predicted from two small ones, against a meter on real decodes."""

from __future__ import annotations

import json

import pytest
import tiny_vaes as tiny
import torch
from diffusers.models.attention_processor import AttnProcessor

from halotile.decode import footprint
from halotile.decode.footprint import Footprint, footprint_of, measure
from halotile.decode.known import cache_path
from halotile.decode.memory import Meter
from halotile.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path / "cache"))


def _arguments(vae, z):
    return {"temb": torch.zeros(z.shape[0])} if vae.config.get("timestep_conditioning") else {}


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_the_prediction_is_what_a_real_decode_holds(kind: str) -> None:
    vae, z = tiny.build(kind), tiny.latent(kind)
    z = z[..., :1, :1].expand(*z.shape[:-2], 12, 20).contiguous()
    meter = Meter(torch.device("cpu"))
    with torch.no_grad(), meter:
        vae.decode(z, **_arguments(vae, z))
    predicted = measure(vae, z.shape).peak_bytes(12 * 20)
    # copies with a border of one latent grow a little slower than the cells, and are counted as of the larger tile
    assert 0.97 * meter.peak_bytes <= predicted <= 1.01 * meter.peak_bytes


def test_terms_are_compared_at_the_size_that_is_asked_for() -> None:
    prints = Footprint(((0.0, 100.0, 0.0), (0.0, 20.0, 1.0)))
    assert [prints.peak_bytes(cells) for cells in (50, 80, 100)] == [5_000, 8_000, 12_000]


def test_a_dense_mask_outgrows_all_else() -> None:
    """M3: the causal mask of Hunyuan Video has a value for each pair of latent cells of all frames."""
    vae, z = tiny.build("AutoencoderKLHunyuanVideo"), tiny.latent("AutoencoderKLHunyuanVideo")
    prints, frames = measure(vae, z.shape), z.shape[2]

    def over_the_mask(cells):
        return prints.peak_bytes(cells) / (4 * (frames * cells) ** 2)

    # of a small tile the last layers hold most, of a large one the mask
    assert over_the_mask(16 * 16) > 20
    assert 1.25 <= over_the_mask(90 * 160) < 1.3, "the mask in float32, and a condition of a byte a pair"


@pytest.mark.parametrize("kind", ["AutoencoderKLWan_2.1", "AutoencoderKLMagvit", "AutoencoderKLCogVideoX"])
def test_the_vae_is_as_it_was(kind: str) -> None:
    vae, z = tiny.build(kind), tiny.latent(kind)
    with torch.no_grad():
        before = vae.decode(z).sample
        held = {name: dict(vars(part)) for name, part in vae.named_modules()}
        vae.use_tiling = True
        measure(vae, z.shape)
        assert vae.use_tiling is True
        vae.use_tiling = held[""]["use_tiling"]
        for name, part in vae.named_modules():
            assert vars(part).keys() == held[name].keys()
            assert all(vars(part)[key] is value for key, value in held[name].items()), name
        assert torch.equal(vae.decode(z).sample, before)


def test_measured_once_and_kept_in_a_file_that_can_be_deleted(monkeypatch) -> None:
    vae, shape = tiny.build("AutoencoderKL"), (1, 4, 64, 64)
    measured = footprint_of(vae, shape)
    (name,) = json.loads(cache_path("footprints.json").read_text())
    assert name.startswith("AutoencoderKL float32 1 x 4 ")
    runs = []
    monkeypatch.setattr(footprint, "measure", lambda *args: runs.append(args) or measured)
    assert footprint_of(vae, (1, 4, 9, 200)) == measured
    assert not runs, "height and width do not matter"
    footprint_of(vae.to(torch.bfloat16), shape)
    footprint_of(tiny.build("AutoencoderKL_flux1"), (1, 16, 64, 64))
    assert len(runs) == 2
    assert len(json.loads(cache_path("footprints.json").read_text())) == 3
    cache_path("footprints.json").unlink()
    footprint_of(vae, shape)
    assert len(runs) == 3


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "\x00", '{"AutoencoderKL": {"terms": "x"}}'])
def test_a_spoilt_cache_is_measured_anew(content: str) -> None:
    vae, shape = tiny.build("AutoencoderKL"), (1, 4, 64, 64)
    measured = footprint_of(vae, shape)
    key = next(iter(json.loads(cache_path("footprints.json").read_text())))
    of_key = [[["a", 0, 0]], [], {}, [[float("nan"), 1, 1]], [[float("inf"), 0, 0]], [[-1e9, -5, 0]]]
    terms = [json.dumps({key: {"terms": each}}) for each in of_key]
    for spoilt in (content, "[" * 100_000, json.dumps({key: 3}), *terms):
        cache_path("footprints.json").write_text(spoilt)
        assert footprint_of(vae, shape) == measured
        assert key in json.loads(cache_path("footprints.json").read_text())


def test_no_place_for_a_cache_is_no_failure(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALOTILE_CACHE", str(tmp_path / "file" / "below"))
    assert footprint_of(tiny.build("AutoencoderKL"), (1, 4, 64, 64)).terms


def test_a_class_that_needs_values_is_refused_by_name() -> None:
    vae = tiny.build("AutoencoderKL")

    def forward(x):
        return x if float(x.sum()) > 0 else -x

    vae.decoder.forward = forward
    with pytest.raises(UnsupportedError, match="what a decode of AutoencoderKL does cannot be told without data"):
        measure(vae, (1, 4, 64, 64))


def test_settings_that_a_decode_depends_on_are_measured_apart() -> None:
    """What a program sets on a VAE after it was made is not in its config."""
    vae, shape = tiny.build("AutoencoderKL"), (2, 4, 64, 64)
    plain = footprint_of(vae, shape)
    vae.use_slicing = True
    assert footprint_of(vae, shape).peak_bytes(1000) < plain.peak_bytes(1000)
    vae.use_slicing = False
    assert footprint_of(vae, shape) == plain
    with torch.autocast("cpu", torch.bfloat16):
        footprint_of(vae, shape)
    assert footprint_of(vae, shape) == plain
    vae.set_attn_processor(AttnProcessor())
    dense = footprint_of(vae, shape)
    assert dense.peak_bytes(128 * 128) > 2 * plain.peak_bytes(128 * 128), "scores for each pair of cells"


def test_weights_on_meta_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta device"):
        footprint_of(tiny.build("AutoencoderKL").to("meta"), (1, 4, 64, 64))
    assert not cache_path("footprints.json").exists()


def test_an_empty_variable_is_none(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HALOTILE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path("footprints.json") == tmp_path / "halotile" / "footprints.json"
