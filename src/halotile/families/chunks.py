"""How classes go through the frames of a clip: with state from frame to frame, or in windows that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from halotile.families.family import Causal, Reason, Windows


def windows_dropping(dropped: Literal["first", "last"]) -> Callable[[Any], Windows]:
    """The windows of classes with such a loop; of each result but the first it drops a frame.

    Source: diffusers' `_temporal_tiled_decode`.
    """

    def windows(vae: Any) -> Windows:
        ratio = vae.temporal_compression_ratio
        window, stride = int(vae.tile_sample_min_num_frames), int(vae.tile_sample_stride_num_frames)
        return Windows(
            window=window // ratio + 1,
            stride=stride // ratio,
            kept=stride,
            blend=window - stride,
            mix=lambda earlier, later: vae.blend_t(earlier, later, window - stride),
            lead=1,
            dropped=dropped,
            off=(("use_framewise_decoding", False),),
        )

    return windows


def minimax_windows(vae: Any) -> Windows:
    """The clips of MiniMax-H3. Source: diffusers' `AutoencoderKLMiniMaxH3._decode`."""
    return Windows(
        window=vae.tokens_chunk_size + vae.token_overlap,
        stride=vae.tokens_chunk_size,
        kept=vae.tokens_chunk_size * vae.temporal_compression_ratio - vae.frame_pre_padding,
        blend=vae.frame_overlap,
        mix=lambda earlier, later: vae._blend(earlier, later, vae.frame_overlap, dim=-3),
        tail=True,
    )


def _magvit_refuses(vae: Any, shape: tuple[int, ...]) -> Reason | None:
    if vae.num_latent_frames_batch_size != 1:
        return (
            f"num_latent_frames_batch_size={vae.num_latent_frames_batch_size}, and its loop would give the first "
            "latent frame of every chunk to the network alone; set it to 1"
        )
    if vae.use_slicing and shape[0] > 1:
        return "its own slicing hands the state of one sample on to the next; turn slicing off"
    return None


FEATURES = Causal("list", "feat_cache")
FEATURES_FIRST = Causal("list", "feat_cache", first="first_chunk")
COGVIDEOX = Causal("returned", "conv_cache", batch=lambda vae: int(vae.num_latent_frames_batch_size))
MAGVIT = Causal("modules", "prev_features", refuse=_magvit_refuses)
