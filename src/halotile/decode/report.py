"""What one call did: `DecodeReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Exactness = Literal["bitwise", "allclose", "approximate"]


@dataclass(frozen=True)
class DecodeReport:
    """The account of one decode or encode, as one rank sees it.

    half: which of the two it was. strategy: what ran. reason: why, and what the VAE's own loop did besides.
    exactness: how equal the result is to one rank's. ranks: how many took part. tiles: chains of calls that could be
    dealt apart (a causal chain over frames is one). calls: calls of the network over all ranks. extents: rows of the
    result that each rank holds, when it was left sharded. loads: work a rank, in cells of the network's input.
    messages, bytes_sent, collectives: this rank's traffic, agreements among the collectives. gathers,
    attention_gathers: of a sharded decode. seconds: this rank's wall time. The rest is None until it is measured.
    """

    half: Literal["decode", "encode"]
    strategy: str
    reason: str
    exactness: Exactness
    ranks: int
    tiles: int
    calls: int
    loads: tuple[int, ...]
    messages: int
    bytes_sent: int
    collectives: int
    seconds: float
    extents: tuple[int, ...] | None = None
    gathers: dict[str, int] = field(default_factory=dict)
    attention_gathers: int = 0
    peak_activation_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)
