"""halotile: decode and encode diffusion autoencoders over the ranks of a torch.distributed group."""

from halotile import errors, families
from halotile.builders import DistributedDecoderBuilder, DistributedVideoDecoder
from halotile.comm import Ranks
from halotile.decode import (
    ChunkDecoder,
    ChunkReport,
    DecodeReport,
    Handle,
    Stream,
    calibrate,
    decode,
    enable_tiling,
    encode,
    explain,
    parallelize,
    plan,
    price_window,
    stream,
    tiled_decode_for,
)
from halotile.denoise import DenoiseReport, TiledDataParallelBuilder, TiledDenoiser
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
from halotile.planning.tilings import (
    DimensionSizeConfig,
    DimensionTilingConfig,
    TileCountConfig,
    TileSizeConfig,
    balanced_tile_split,
)
from halotile.spatial import SpatialTensor

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "ChunkDecoder",
    "ChunkReport",
    "DecodeReport",
    "DenoiseReport",
    "DimensionSizeConfig",
    "DimensionTilingConfig",
    "DistributedDecoderBuilder",
    "DistributedVideoDecoder",
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
    "Stream",
    "TileCountConfig",
    "TilePlan",
    "TileSizeConfig",
    "TiledDataParallelBuilder",
    "TiledDenoiser",
    "UnsupportedError",
    "apply_tile_plan",
    "balanced_tile_split",
    "calibrate",
    "decode",
    "enable_tiling",
    "encode",
    "errors",
    "explain",
    "families",
    "parallelize",
    "plan",
    "price_window",
    "stream",
    "tile_overlap_plan",
    "tile_shape_plan",
    "tiled_decode_for",
]
