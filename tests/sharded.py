"""One kind of tiny autoencoder, one half of it, on n ranks with sharded activations: shared by the shard tests.

Kinds are those of tiny_vaes.py and of more_vaes.py. `run` gives what every rank got and its report.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import more_vaes as more
import tiny_vaes as tiny
import torch
from ranks import run_ranks

import halotile
from halotile.errors import HalotileError

KINDS = {**tiny.CONFIGS, **more.CONFIGS}
HALVES = ("decode", "encode")
TOLERANCE = 2e-5
"""Of the largest value, in float32: norms and reductions add the rows of all ranks in another order."""

Result = tuple[torch.Tensor, halotile.DecodeReport]


def cases(kinds: Any = KINDS) -> list[tuple[str, str]]:
    """(kind, half) for every half that the kind's class has."""
    import diffusers

    return [(name, half) for name in kinds for half in HALVES if hasattr(getattr(diffusers, KINDS[name][0]), half)]


def exported_classes() -> list[str]:
    """Every model that diffusers exports from its autoencoders and that has a decode or an encode."""
    import diffusers
    import diffusers.models.autoencoders as module

    models = {name: getattr(module, name) for name in dir(module)}
    return [
        name
        for name, cls in models.items()
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and any(hasattr(cls, h) for h in HALVES)
    ]


def build(name: str, seed: int = 0) -> Any:
    """A fresh autoencoder of this kind, the same weights in every process."""
    if name in tiny.CONFIGS:
        return tiny.build(name, seed)
    import diffusers

    torch.manual_seed(seed)
    cls, own = more.CONFIGS[name][:2]
    return getattr(diffusers, cls)(**own).eval().requires_grad_(False)


@cache
def built(name: str) -> Any:
    """The one autoencoder of this kind and process, for calls, which leave it as it was."""
    return build(name)


def make_input(
    name: str, half: str, height: int | None = None, batch: int | None = None, width: int | None = None
) -> torch.Tensor:
    """Latents or pixels of this kind; `height` and `width` in latents, and `batch`, instead of the kind's own."""
    shape, ratio, frames_ratio = list(KINDS[name][2]), KINDS[name][3], KINDS[name][4]
    shape[0], shape[-2] = batch or shape[0], height or shape[-2]
    shape[-1] = width or shape[-1]
    if half == "encode":
        if len(shape) == 5:
            shape[2] = tiny.ENCODE_FRAMES.get(name, (shape[2] - 1) * frames_ratio + 1)
        shape[1:2] = [more.CHANNELS.get(name, 3)]
        shape[-2:] = [shape[-2] * ratio, shape[-1] * ratio]
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def call(vae: Any, name: str, half: str, x: torch.Tensor, seed: int = 11) -> torch.Tensor:
    """The autoencoder's own method as a pipeline calls it, from a fixed seed; the tensor in its output."""
    torch.manual_seed(seed)
    if half == "encode":
        return tiny.encode(vae, name, x)
    if name in tiny.CONFIGS:
        return tiny.decode(vae, name, x)
    out = vae.decode(x, **more.DECODE_KW.get(name, {}))
    return out.sample if hasattr(out, "sample") else out


def alone(name: str, half: str, **sizes: Any) -> torch.Tensor:
    """What one rank computes without halotile."""
    with torch.no_grad():
        return call(built(name), name, half, make_input(name, half, **sizes))


def run(
    name: str,
    half: str,
    n: int,
    *,
    members: tuple[int, ...] | None = None,
    inference: bool = False,
    strict: bool = False,
    **sizes: Any,
) -> list[Result]:
    """What each of `n` gloo ranks got with `deliver="all"`, and its report. Raises what rank 0 raised.

    `members` and `strict` are as of `run_ranks` and `parallelize`; `inference` is for inference mode.
    """
    results = run_ranks(_one_rank, n, name, half, inference, strict, sizes, members=members)
    failed = next((result for result in results if isinstance(result, HalotileError)), None)
    if failed is not None:
        raise failed
    return results


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def _one_rank(
    group: Any, name: str, half: str, inference: bool, strict: bool, sizes: dict[str, Any]
) -> Result | HalotileError:
    vae, x = built(name), make_input(name, half, **sizes)
    mode = torch.inference_mode() if inference else torch.no_grad()
    try:
        with mode, halotile.parallelize(vae, group, strategy="shard", halves=(half,), strict=strict) as handle:
            out = call(vae, name, half, x)
    except HalotileError as error:
        return error
    assert handle.report is not None
    return out, handle.report
