"""One call without a handle: `decode`, `encode`, and `enable_tiling` for pipelines."""

from __future__ import annotations

from typing import Any

import torch

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Deliver, Group, Ranks
from halotile.decode.door import tensor_of
from halotile.decode.options import Progress, Strategy
from halotile.decode.parallelize import HALVES, Handle, handle_of, parallelize
from halotile.errors import HalotileError, UnsupportedError
from halotile.families import Half, drop_added, sync_window
from halotile.planning import Scheduler
from halotile.planning.tilings import Tiling


def decode(
    vae: Any,
    latents: torch.Tensor,
    group: Group | None = None,
    strategy: Strategy = "auto",
    tiling: Tiling | None = None,
    deliver: Deliver = "all",
    driver: int = 0,
    *,
    scheduler: Scheduler = "balanced",
    strict: bool = False,
    dim: int | None = None,
    shards_per_tile: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    **own: Any,
) -> torch.Tensor | None:
    """Decode `latents` (`B C H W`, `B C F H W`, `B C D H W`) over the ranks of `group`; all ranks pass the same.

    `vae` is anything with a method `decode`, or a callable from latents to a sample: a decoder's module, a function.
    Returns the sample in the dtype of `latents`, or None on a rank that is to have nothing. `own` goes to the VAE's
    `decode` (`temb`, say). For the rest, and for what is raised, see `parallelize`.
    """
    return _once(
        vae, "decode", latents, own, group, strategy=strategy, deliver=deliver, tiling=tiling, scheduler=scheduler,
        driver=driver, strict=strict, dim=dim, shards_per_tile=shards_per_tile, timeout_s=timeout_s, progress=progress,
    )  # fmt: skip


def encode(
    vae: Any,
    pixels: torch.Tensor,
    group: Group | None = None,
    strategy: Strategy = "auto",
    tiling: Tiling | None = None,
    deliver: Deliver = "all",
    driver: int = 0,
    *,
    scheduler: Scheduler = "balanced",
    strict: bool = False,
    dim: int | None = None,
    shards_per_tile: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    **own: Any,
) -> torch.Tensor | None:
    """Encode `pixels` (`B C H W`, `B C F H W`, `B C D H W`, -1 to 1) over the ranks of `group`.

    `vae` is anything with a method `encode`, or a callable from pixels to latents: an encoder's module, a function.
    Returns the latents, of a posterior its mode, in the dtype of `pixels`; None on a rank that is to have nothing. To
    get the posterior itself, `parallelize` the VAE and call its own `encode`.
    """
    return _once(
        vae, "encode", pixels, own, group, strategy=strategy, deliver=deliver, tiling=tiling, scheduler=scheduler,
        driver=driver, strict=strict, dim=dim, shards_per_tile=shards_per_tile, timeout_s=timeout_s, progress=progress,
    )  # fmt: skip


def enable_tiling(vae: Any, process_group: Group | None = None, **own: Any) -> Handle | None:
    """Turn the VAE's own tiling on, and share its tiles over `process_group`; every rank gets the full result.

    `own` goes to the VAE's `enable_tiling`: tile geometry, the loop over frames and the blending stay the VAE's. On
    classes that keep a window in pixels and one in latents, the latter follows when only the former is given. Without a
    group nothing is distributed, and None is returned. Calling it again replaces what an earlier call set.

    Raises UnsupportedError for a class without tiling or arguments that it does not take, and MembershipError.
    """
    name = type(vae).__name__
    own_method = getattr(vae, "enable_tiling", None)
    if not callable(own_method) or not hasattr(vae, "use_tiling"):
        raise UnsupportedError(f"{name} has no tile loop of its own to enable")
    ranks = Ranks.of(process_group) if process_group is not None else None
    try:
        own_method(**own)
    except TypeError as error:
        raise UnsupportedError(f"{name}.enable_tiling does not take {', '.join(own)}: {error}") from error
    if own:
        drop_added(vae)
    if not any("latent" in argument for argument in own):
        sync_window(vae)
    earlier = handle_of(vae)
    if earlier is not None:
        earlier.remove()
    return None if ranks is None else parallelize(vae, ranks, strategy="tile")


def _once(
    vae: Any, half: Half, x: torch.Tensor, own: dict[str, Any], group: Group | None, **options: Any
) -> torch.Tensor | None:
    ranks = Ranks.of(group)
    try:
        target = as_vae(vae, half)
        handle = parallelize(target, group, halves=(half,), **options)
    except HalotileError as error:
        # the other ranks are making this call, and count it
        Call(ranks).fail(error)
        raise
    with handle:
        return tensor_of(getattr(target, half)(x, **own))


def as_vae(vae: Any, half: Half) -> Any:
    """`vae`, or a plain callable in the shape of one. Raises UnsupportedError where it is parallelized already."""
    if handle_of(vae) is not None:
        raise UnsupportedError(
            f"this {type(vae).__name__} is parallelized: call its {half} method, or remove() its handle first"
        )
    return vae if _has_methods(vae) else PlainCallable(vae)


def _has_methods(vae: Any) -> bool:
    """Whether `vae` is to be asked for its methods; a pipeline, which is callable too, is told what to pass instead."""
    return not callable(vae) or any(hasattr(vae, name) for name in (*HALVES, "vae"))


class PlainCallable:
    """A module or function from latents to a sample, or the other way round, in the shape of an autoencoder."""

    def __init__(self, function: Any) -> None:
        owner = getattr(function, "__self__", function)
        self.function = function
        self.decoder = self.encoder = owner if isinstance(owner, torch.nn.Module) else None

    def decode(self, x: torch.Tensor, **own: Any) -> Any:
        """What the callable returns."""
        return self.function(x, **own)

    encode = decode
