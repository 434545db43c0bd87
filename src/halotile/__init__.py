"""halotile: decode and encode diffusion autoencoders over the ranks of a torch.distributed group."""

from halotile import errors, families
from halotile.comm import Ranks
from halotile.decode import DecodeReport, Handle, decode, enable_tiling, encode, parallelize
from halotile.errors import (
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
from halotile.spatial import SpatialTensor

__version__ = "0.1.0"

__all__ = [
    "DecodeReport",
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
    "UnsupportedError",
    "decode",
    "enable_tiling",
    "encode",
    "errors",
    "families",
    "parallelize",
]
