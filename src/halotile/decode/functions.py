"""One call without a handle: `decode`, `encode`, and `enable_tiling` for pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from halotile.comm import DEFAULT_TIMEOUT_S, Call, Deliver, Ranks
from halotile.decode.door import tensor_of
from halotile.decode.parallelize import Handle, handle_of, parallelize
from halotile.decode.run import Progress, Strategy
from halotile.errors import HalotileError, UnsupportedError
from halotile.families import Half, sync_window
from halotile.planning import Scheduler


def decode(
    vae: Any,
    latents: torch.Tensor,
    group: dist.ProcessGroup | Ranks | None = None,
    strategy: Strategy = "auto",
    tiling: None = None,
    deliver: Deliver = "all",
    driver: int = 0,
    *,
    scheduler: Scheduler = "balanced",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    **own: Any,
) -> torch.Tensor | None:
    """Decode `latents` (`B C H W` or `B C F H W`) over the ranks of `group`; every rank passes the same latents.

    Returns the sample in the dtype of `latents`, or None on a rank that is to have nothing. `own` goes to the VAE's
    `decode` (`temb`, say). For the rest, and for what is raised, see `parallelize`.
    """
    return _once(vae, "decode", latents, own, group, strategy, deliver, tiling, scheduler, driver, timeout_s, progress)


def encode(
    vae: Any,
    pixels: torch.Tensor,
    group: dist.ProcessGroup | Ranks | None = None,
    strategy: Strategy = "auto",
    tiling: None = None,
    deliver: Deliver = "all",
    driver: int = 0,
    *,
    scheduler: Scheduler = "balanced",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    **own: Any,
) -> torch.Tensor | None:
    """Encode `pixels` (`B C H W` or `B C F H W`, -1 to 1) over the ranks of `group`.

    Returns the latents, of a posterior its mode, in the dtype of `pixels`; None on a rank that is to have nothing. To
    get the posterior itself, `parallelize` the VAE and call its own `encode`.
    """
    return _once(vae, "encode", pixels, own, group, strategy, deliver, tiling, scheduler, driver, timeout_s, progress)


def enable_tiling(vae: Any, process_group: dist.ProcessGroup | Ranks | None = None, **own: Any) -> Handle | None:
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
    if not any("latent" in argument for argument in own):
        sync_window(vae)
    earlier = handle_of(vae)
    if earlier is not None:
        earlier.remove()
    return None if ranks is None else parallelize(vae, ranks, strategy="tile")


def _once(
    vae: Any,
    half: Half,
    x: torch.Tensor,
    own: dict[str, Any],
    group: dist.ProcessGroup | Ranks | None,
    strategy: Strategy,
    deliver: Deliver,
    tiling: None,
    scheduler: Scheduler,
    driver: int,
    timeout_s: float,
    progress: Progress | None,
) -> torch.Tensor | None:
    ranks = Ranks.of(group)
    try:
        if handle_of(vae) is not None:
            raise UnsupportedError(
                f"this {type(vae).__name__} is parallelized: call its {half} method, or remove() its handle first"
            )
        handle = parallelize(
            vae,
            group,
            strategy,
            deliver,
            tiling,
            scheduler,
            (half,),
            driver=driver,
            timeout_s=timeout_s,
            progress=progress,
        )
    except HalotileError as error:
        # the other ranks are making this call, and count it
        Call(ranks).fail(error)
        raise
    with handle:
        return tensor_of(getattr(vae, half)(x, **own))
