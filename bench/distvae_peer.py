"""DistVAE (xdit-project) as a contestant, used as its own `distvae.vae` module offers it; and a count of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from unittest import mock

import torch.distributed as dist

# dist.isend and dist.irecv stay: P2POp compares with them, and neither library calls them outside a batch
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "recv",
)


def version() -> str | None:
    """The installed DistVAE, or None."""
    try:
        return metadata.version("distvae")
    except metadata.PackageNotFoundError:
        return None


def shard_decoder(vae: Any) -> None:
    """Replace the decoder of `vae` by DistVAE's, over the default group. Raises ValueError where it has none."""
    from distvae.vae import parallelize_decoder  # noqa: PLC0415  # its import patches nothing, but takes a second

    parallelize_decoder(vae, dist.group.WORLD)


@dataclass
class Calls:
    """What one rank asked of torch.distributed: calls; messages sent plus collectives."""

    calls: int = 0
    messages: int = 0


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of torch.distributed made inside. Barriers are not counted: the bench makes them."""
    found = Calls()
    batch = dist.batch_isend_irecv

    def count_batch(ops: list[dist.P2POp]) -> list[dist.Work]:
        found.calls += 1
        found.messages += sum(op.op is dist.isend for op in ops)
        return batch(ops)

    def count(name: str) -> Any:
        original = getattr(dist, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found.calls += 1
            found.messages += name != "recv"
            return original(*args, **kwargs)

        return wrapped

    replaced = {name: count(name) for name in _COLLECTIVES}
    with mock.patch.multiple(dist, batch_isend_irecv=count_batch, **replaced):
        yield found
