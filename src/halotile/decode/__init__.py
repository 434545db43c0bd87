"""Decoding and encoding over ranks."""

from halotile.decode.functions import decode, enable_tiling, encode
from halotile.decode.parallelize import Handle, parallelize
from halotile.decode.report import DecodeReport
from halotile.decode.run import Progress, Strategy

__all__ = ["DecodeReport", "Handle", "Progress", "Strategy", "decode", "enable_tiling", "encode", "parallelize"]
