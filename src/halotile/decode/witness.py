"""What a loop of a class that halotile has no row for may not do, since its calls run elsewhere and later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halotile.decode.foresee import Companion
from halotile.errors import UnsupportedError

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
_SIMPLE = (bool, int, float, str, type(None))


class Witness:
    """Sees whether a loop steers its network by anything but the arguments of its calls.

    Attributes, buffers and parameters of the network, plain attributes of the VAE, the default dtype and autocast must
    be at every call as they were before the loop began; arguments must be values that can be kept until the call runs.
    """

    def __init__(self, vae: Any, network: nn.Module) -> None:
        self._vae = vae
        self._network = network
        self._before = self._look()
        self._lists: dict[int, tuple[list[Any], list[Any]]] = {}

    def check(self, values: tuple[Any, ...]) -> None:
        """Raise UnsupportedError if anything changed, or if a call with the arguments `values` cannot wait."""
        now = self._look()
        changed = sorted({name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name)})
        if changed:
            raise UnsupportedError(
                f"the loop sets {', '.join(changed[:4])} around or between its calls, and the network may read it"
            )
        for value in values:
            if type(value) is list:
                held, was = self._lists.setdefault(id(value), (value, list(value)))
                if len(held) != len(was) or any(a is not b for a, b in zip(held, was, strict=True)):
                    raise UnsupportedError("the loop changes a list that it gives to its network from call to call")
            if not _can_wait(value):
                raise UnsupportedError(
                    f"the loop gives its network a {type(value).__name__}, which it may change before the call runs"
                )

    def _look(self) -> dict[str, object]:
        out: dict[str, object] = {"the default dtype": torch.get_default_dtype()}
        for device in ("cpu", "cuda"):
            out[f"autocast on {device}"] = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        for name, part in self._network.named_modules():
            for kind in (part._parameters, part._buffers):
                out |= {f"{name}.{key}": _mark(value) for key, value in kind.items()}
            out |= {f"{name}.{key}": _mark(value) for key, value in vars(part).items() if key not in _OF_TORCH}
        for key, value in vars(self._vae).items():
            if isinstance(value, _SIMPLE):
                out[f"vae.{key}"] = value
        return out


def _mark(value: object) -> object:
    """Something that differs when `value` was replaced, or changed in place."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, _SIMPLE):
        return value
    return repr(value)[:2000] if isinstance(value, (list, tuple, dict, set)) else id(value)


def _can_wait(value: object) -> bool:
    if isinstance(value, (*_SIMPLE, torch.Tensor, torch.dtype, torch.device, Companion)):
        return True
    if type(value) is list:
        return all(isinstance(element, (*_SIMPLE, torch.Tensor)) for element in value)
    return type(value) is tuple and all(isinstance(element, (*_SIMPLE, torch.Tensor)) for element in value)
