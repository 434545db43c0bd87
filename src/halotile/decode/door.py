"""The door of every call: what may come in, in which dtype, and in which form the result goes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from halotile.errors import GradientError, PlanError, UnsupportedError
from halotile.families import Half

ROWS_DIM = -2
"""Height, in `B C H W` and in `B C F H W`."""


_FIELDS = ("sample", "latent", "latents", "latent_dist")


@dataclass(frozen=True)
class Undelivered:
    """What a rank gets of a result that went to another one: every field that diffusers' outputs have is None."""

    sample: None = None
    latent_dist: None = None
    latent: None = None
    latents: None = None


def check_input(x: object, half: Half) -> torch.Tensor:
    """The latents or pixels as a tensor of four or five dims, none empty. Raises PlanError, GradientError."""
    what = "latents" if half == "decode" else "pixels"
    if not isinstance(x, torch.Tensor):
        raise PlanError(f"{what} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise PlanError(f"{what} must be of a floating dtype, got {x.dtype}")
    if x.dim() not in (4, 5) or not x.numel():
        raise PlanError(f"{what} must have the shape B C H W or B C F H W and no empty dim, got {tuple(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise GradientError(
            f"halotile is for inference, but these {what} require gradients; call it under torch.no_grad() or "
            "torch.inference_mode(), or pass a detached tensor"
        )
    return x


def dtype_of(vae: Any, half: Half, given: torch.dtype) -> torch.dtype:
    """The dtype that an input of dtype `given` is cast to: its own when this half of the VAE has weights of it.

    Else the VAE's own `dtype`, which diffusers keeps right where weights are stored in another than they compute in.
    """
    network = getattr(vae, "decoder" if half == "decode" else "encoder", vae)
    parameters = network.parameters() if isinstance(network, torch.nn.Module) else ()
    floating = [p.dtype for p in parameters if p.is_floating_point()]
    if given in floating or not floating:
        return given
    own = getattr(vae, "dtype", floating[0])
    return own if isinstance(own, torch.dtype) else floating[0]


def arguments_fact(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What the further arguments of a call are, for the ranks to compare: of a tensor its shape and dtype."""
    return ", ".join([*map(_fact, args), *(f"{name}={_fact(kwargs[name])}" for name in sorted(kwargs))])


def _fact(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_fact, value))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def map_tensors(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`output` (a tensor, tuple, diffusers output or posterior) with its tensors changed and its types kept."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        parts = [map_tensors(part, change) for part in output]
        # a named tuple takes its parts one by one
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, **{f.name: map_tensors(getattr(output, f.name), change) for f in fields(output)})
    if isinstance(output, dict):
        changed_items = {key: map_tensors(part, change) for key, part in output.items()}
        return type(output)(changed_items)
    parameters = getattr(output, "parameters", None)
    if isinstance(parameters, torch.Tensor):
        # a posterior: the rest of it follows from its parameters
        changed = change(parameters)
        known = {"deterministic": output.deterministic} if hasattr(output, "deterministic") else {}
        return output if changed is parameters else type(output)(changed, **known)
    return output


def cat_outputs(outputs: Sequence[Any]) -> Any:
    """One output for a batch, from one for each of its samples."""
    parts: list[list[torch.Tensor]] = []
    for output in outputs:
        found: list[torch.Tensor] = []
        map_tensors(output, lambda tensor, found=found: found.append(tensor) or tensor)  # type: ignore[misc]
        parts.append(found)
    whole = iter([torch.cat(column) for column in zip(*parts, strict=True)])
    return map_tensors(outputs[0], lambda _: next(whole))


def tensor_of(output: Any) -> torch.Tensor | None:
    """The picture or the latent in whatever a VAE returned; of a posterior its mode. None if undelivered.

    Raises UnsupportedError for an output of another kind.
    """
    if isinstance(output, torch.Tensor) or output is None:
        return output
    if isinstance(output, Undelivered):
        return None
    if isinstance(output, (tuple, list)) and output:
        return tensor_of(output[0])
    for name in _FIELDS:
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
        if found is not None and callable(getattr(found, "mode", None)):
            mode = found.mode()
            assert isinstance(mode, torch.Tensor)
            return mode
    if isinstance(output, dict) and output:
        # after the fields: the outputs of diffusers are dicts as well
        return tensor_of(next((output[name] for name in _FIELDS if name in output), next(iter(output.values()))))
    raise UnsupportedError(f"cannot find a tensor in a result of type {type(output).__name__}")
