"""Decoding and encoding over ranks."""

from halotile.decode.batches import Stream
from halotile.decode.calibrate import calibrate
from halotile.decode.chunks import ChunkDecoder, ChunkReport
from halotile.decode.explain import explain
from halotile.decode.functions import decode, enable_tiling, encode
from halotile.decode.options import Progress, Strategy
from halotile.decode.parallelize import Handle, parallelize
from halotile.decode.propose import plan, price_window
from halotile.decode.rectangle import tiled_decode_for
from halotile.decode.report import DecodeReport
from halotile.decode.stream import stream

__all__ = [
    "ChunkDecoder",
    "ChunkReport",
    "DecodeReport",
    "Handle",
    "Progress",
    "Strategy",
    "Stream",
    "calibrate",
    "decode",
    "enable_tiling",
    "encode",
    "explain",
    "parallelize",
    "plan",
    "price_window",
    "stream",
    "tiled_decode_for",
]
