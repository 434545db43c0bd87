"""Run one of a VAE's own calls without data, as often as is needed to know what it does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.decode.door import tensor_of
from halotile.decode.foresee import restored
from halotile.decode.patch import patched
from halotile.errors import UnsupportedError
from halotile.families import Half, takes_timestep

SIDES_LAT = (16, 32)
"""Latents along height and width of the two small tiles from which larger ones follow."""


def follow(vae: Any, half: Half, shape: tuple[int, ...], watch: AbstractContextManager[Any]) -> torch.Tensor:
    """The VAE's own untiled decode or encode of an input of `shape`, under `watch` and FakeTensorMode.

    Every shape and dtype is real, no value is computed, and the VAE is left as it was. Returns the fake result. Raises
    UnsupportedError when the class cannot be followed without data.
    """
    weight = next(iter(vae.parameters()))
    tiling = {"use_tiling": False} if hasattr(vae, "use_tiling") else {}
    try:
        with (
            torch.no_grad(),
            restored(list(vae.modules())),
            patched(vae, **tiling),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            x = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            more = {"temb": x.new_zeros(shape[0])} if half == "decode" and takes_timestep(vae) else {}
            with watch:
                # not what `parallelize` put in its place: planning is no call of a group
                output = getattr(type(vae), half)(vae, x, **more)
            result = tensor_of(output)
    except Exception as error:
        raise UnsupportedError(
            f"what a {half} of {type(vae).__name__} does cannot be told without data: {type(error).__name__}: {error}"
        ) from error
    assert result is not None
    return result
