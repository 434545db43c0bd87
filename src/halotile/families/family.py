"""What a row of halotile.families holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from halotile.families.axis_loop import Half
from halotile.families.layout import Layout

Reason = str


@dataclass(frozen=True)
class Family:
    """One autoencoder class.

    ratio: pixels a latent along height and width.
    min_tile_lat: the thinnest tile that the network of a half takes, in latents.
    temporal: the names of the attributes of a loop over frames, when the class has one.
    frames: how its latent frames become frames; None for pictures, and where it is not known.
    no_grid: why halotile's own grid of tiles cannot be laid over it; empty where it can.
    carries: the method that clears state which the class keeps on its modules from call to call.
    record_on: where stand-ins for results live while a loop is recorded.
    blends: the methods that mix neighbouring results; a recording leaves them out, as there is nothing to mix yet.
    forgotten: attributes that the network writes on its modules and never reads.
    own_slicing: whether the class's `use_slicing` works with every argument of `decode`.
    rectangles: how halotile stands in for the class's own loop where attributes that it does not know are set.
    causal: how its network hands state from latent frame to latent frame, when it does.
    windows: its loop over frames in windows that overlap, when it has one, read off a VAE.
    refuse: what the class's own loop gets wrong, as a function of (vae, half, input shape) to a reason or None.
    refuse_frames: the same, where it is a matter of the frames (or the batch), and not of the window.
    """

    name: str
    layout: Layout
    ratio: Callable[[Any], int]
    min_tile_lat: Callable[[Any, Half], int] = lambda vae, half: 1
    temporal: Temporal | None = None
    frames: Frames | None = None
    no_grid: Reason = ""
    carries: str | None = None
    record_on: Literal["meta", "zeros"] = "meta"
    blends: tuple[str, ...] = ("blend_v", "blend_h")
    forgotten: tuple[str, ...] = ()
    own_slicing: bool = True
    rectangles: Rectangles | None = None
    causal: Causal | None = None
    windows: Callable[[Any], Windows] | None = None
    refuse: tuple[Callable[[Any, Half, tuple[int, ...]], Reason | None], ...] = ()
    refuse_frames: tuple[Callable[[Any, Half, tuple[int, ...]], Reason | None], ...] = ()


@dataclass(frozen=True)
class Temporal:
    """A loop over frames with a window and a stride in sample frames, switched on by a flag a half.

    `defect` is what the class's decode gets wrong with it, to be said where it runs.
    """

    decode_flag: str
    encode_flag: str
    defect: str = ""
    window: str = "tile_sample_min_num_frames"
    stride: str = "tile_sample_stride_num_frames"


@dataclass(frozen=True)
class Frames:
    """How latent frames become frames: L of them are 1 + (L - 1) * ratio, since the first makes one alone.

    apart: why tiles of frames cannot be run apart from each other, so that all frames go through as one; empty where
    they can.
    """

    ratio: Callable[[Any], int]
    apart: Reason = ""


@dataclass(frozen=True)
class Causal:
    """State that a class's network hands from one latent frame to the next ones, so that a clip may come in chunks.

    where, name: where the state is: in a `list` that the network is given under `name` and writes into; in the value
    that it is given under `name` and gives back (`returned`) beside its result; in the attribute `name` of its
    `modules`. first: the network's argument that marks the first latent frame, if it has one. batch: how many latent
    frames the class's loop gives to the network at a time; what the clip has more than a multiple comes with the first.
    refuse: why this VAE cannot be run in chunks, as a function of (vae, input shape) to a reason or None.
    """

    where: Literal["list", "returned", "modules"]
    name: str
    first: str = ""
    batch: Callable[[Any], int] = lambda vae: 1
    refuse: Callable[[Any, tuple[int, ...]], Reason | None] = lambda vae, shape: None


@dataclass(frozen=True)
class Windows:
    """A class's loop over frames as it is set on one VAE.

    window, stride: latent frames of a window, and from one to the next. kept: frames of the result that a window adds;
    lead: how many more the first adds. dropped: which frame of a later window's result is left out. mix: the class's
    blend of two results over `blend` frames, as (earlier, later) to what is left of the later. tail: whether the last
    window adds all that it has. off: attributes to set while one window is decoded by itself.
    """

    window: int
    stride: int
    kept: int
    blend: int
    mix: Callable[[Any, Any], Any]
    lead: int = 0
    dropped: Literal["first", "last", ""] = ""
    tail: bool = False
    off: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Rectangles:
    """A tile loop that halotile's own may stand in for: what is called by which name, and what runs on each tile.

    decode, encode: the methods that `_decode` and `_encode` call to run the class's loop. wraps: whether the first one
    returns what `decode` does, and takes `return_dict`, and not a bare tensor. before_decoder, after_encoder: what runs
    on each tile besides the network, as a function of (vae, tile). mix: whether neighbours are blended and cut, or laid
    over each other with a ramp mask.
    """

    decode: str
    encode: str
    wraps: bool = True
    before_decoder: Callable[[Any, Any], Any] = lambda vae, tile: tile
    after_encoder: Callable[[Any, Any], Any] = lambda vae, tile: tile
    mix: Literal["blend", "mask"] = "blend"
