"""Decoding and encoding over ranks."""

from halotile.decode.functions import decode, enable_tiling, encode
from halotile.decode.options import Progress, Strategy
from halotile.decode.parallelize import Handle, parallelize
from halotile.decode.report import DecodeReport

__all__ = ["DecodeReport", "Handle", "Progress", "Strategy", "decode", "enable_tiling", "encode", "parallelize"]
