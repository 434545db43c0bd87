"""What was measured once, kept in JSON files of the user's cache folder; delete them to measure anew."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from halotile.families.cuts import temporal_chunks


def cache_path(name: str) -> Path:
    """The file of that name in `$HALOTILE_CACHE`, by default in the user's cache folder."""
    folder = os.environ.get("HALOTILE_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "halotile")
    return Path(folder) / name


def read(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it cannot be read or is no JSON object."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def write(path: Path, known: dict[str, Any]) -> bool:
    """Put a whole file in its place at once; says whether it could be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1))
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        return False
    return True


def key_of(vae: Any, latent_shape: Sequence[int]) -> str:
    """What a decode of latents `B C [F] H W` depends on besides their height and width, in short."""
    weight = next(iter(vae.parameters()))
    config = json.dumps(dict(vae.config), sort_keys=True, default=str)
    # a loop over frames holds its chunks
    chunks = temporal_chunks(vae, tuple(latent_shape))
    # what programs set on a VAE, and takes part in what a decode holds
    settings = {name: value for name, value in vars(vae).items() if isinstance(value, (bool, int, float, str))}
    settings = {name: value for name, value in settings.items() if not name.startswith(("tile_", "use_tiling"))}
    processors = sorted({type(part.processor).__name__ for part in vae.modules() if hasattr(part, "processor")})
    kind = weight.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    set_to = f"{sorted(settings.items())} {processors} {autocast}"
    facts = f"{config} {chunks} {set_to} torch {torch.__version__} diffusers {version('diffusers')} {kind}"
    lead = " x ".join(map(str, latent_shape[:-2]))
    return f"{type(vae).__name__} {str(weight.dtype)[6:]} {lead} {hashlib.sha256(facts.encode()).hexdigest()[:16]}"
