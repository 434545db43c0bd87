"""A VAE folder in diffusers' `save_pretrained` layout, checked first, then loaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halotile.errors import PlanError, UnsupportedError


def class_of(folder: Path) -> str:
    """The diffusers class that `folder` holds, from its config.json. Raises PlanError where there is none."""
    return str(_config(folder)["_class_name"])


def load_vae(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The VAE on `device`, in `dtype` (None: float32) for inference.

    Raises UnsupportedError for a class that is no autoencoder, PlanError for weights that are missing or damaged.
    """
    cls = _class(folder)
    try:
        # not to(dtype) afterwards: some classes keep a part of themselves in float32
        vae, found = cls.from_pretrained(folder, torch_dtype=dtype, output_loading_info=True, local_files_only=True)
    except Exception as error:  # diffusers, safetensors and pickle each raise their own kinds
        needs_accelerate = getattr(cls, "_keep_in_fp32_modules", None) and find_spec("accelerate") is None
        hint = (
            "diffusers loads this class only where the package accelerate is installed" if needs_accelerate else error
        )
        raise PlanError(f"{folder}: cannot be loaded as {cls.__name__}: {hint}") from error
    if found["missing_keys"]:
        raise PlanError(f"{folder}: {len(found['missing_keys'])} weights are missing, {found['missing_keys'][0]} first")
    return vae.to(device).eval().requires_grad_(False)


def without_weights(folder: Path) -> Any:
    """The VAE with fakes for weights: its class, configuration and modules, for what follows from those alone."""
    with FakeTensorMode():
        return _class(folder).from_config(_config(folder)).eval()


def _class(folder: Path) -> Any:
    import diffusers  # noqa: PLC0415 - an extra, which models from elsewhere need not have
    from diffusers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    name = class_of(folder)
    cls = getattr(diffusers, name, None)
    if cls is None:
        raise UnsupportedError(f"{folder}: diffusers {diffusers.__version__} has no class {name}")
    if not (hasattr(cls, "encode") and hasattr(cls, "decode") and hasattr(cls, "from_pretrained")):
        raise UnsupportedError(f"{folder}: {name} is not an autoencoder (it has no encode and decode)")
    return cls


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise PlanError(f"{folder}: not a folder; name one made by save_pretrained")
    path = folder / "config.json"
    if not path.is_file():
        below = folder / "vae"
        hint = f"; did you mean {below}?" if (below / "config.json").is_file() else ""
        raise PlanError(f"{folder}: no config.json in it; name a VAE's folder made by save_pretrained{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        name = config.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise PlanError(f"{path}: not a readable VAE configuration: {error}") from error
    if not isinstance(name, str):
        raise PlanError(f"{path}: names no _class_name")
    return dict(config)
