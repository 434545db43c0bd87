"""halotile: decode and encode diffusion autoencoders over the ranks of a torch.distributed group."""

from halotile import errors, families
from halotile.comm import Ranks
from halotile.decode import (
    DecodeReport,
    Handle,
    decode,
    enable_tiling,
    encode,
    parallelize,
    plan,
    price_window,
    tiled_decode_for,
)
from halotile.errors import (
    BusyError,
    GradientError,
    HalotileError,
    LostGroupError,
    MembershipError,
    MismatchError,
    MissingRankError,
    PlanError,
    RemoteRankError,
    UnsupportedError,
)
from halotile.families import apply_tile_plan, tile_overlap_plan, tile_shape_plan
from halotile.fleet import Fleet
from halotile.planning import TilePlan
from halotile.spatial import SpatialTensor

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "DecodeReport",
    "Fleet",
    "GradientError",
    "HalotileError",
    "Handle",
    "LostGroupError",
    "MembershipError",
    "MismatchError",
    "MissingRankError",
    "PlanError",
    "Ranks",
    "RemoteRankError",
    "SpatialTensor",
    "TilePlan",
    "UnsupportedError",
    "apply_tile_plan",
    "decode",
    "enable_tiling",
    "encode",
    "errors",
    "families",
    "parallelize",
    "plan",
    "price_window",
    "tile_overlap_plan",
    "tile_shape_plan",
    "tiled_decode_for",
]
