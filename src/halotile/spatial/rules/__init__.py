"""The rules, by kind of operation; importing this registers all of them."""

from halotile.spatial.rules import (  # noqa: F401
    attention,
    convolution,
    extremes,
    factories,
    indexing,
    interpolation,
    joins,
    matmul,
    norms,
    padding,
    pooling,
    reductions,
    scans,
    scattering,
    shuffle,
    slices,
    softmax,
    statistics,
    views,
)
