"""What local ranks need, imported once by the server that they are forked from: see `launch._start_method`."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

for _name in ("torch.distributed.elastic.multiprocessing", "diffusers.models.autoencoders", "halotile"):
    # a rank that needs what is not here fails as it would by itself; the server must not
    with suppress(Exception):
        import_module(_name)
