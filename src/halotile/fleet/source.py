"""Where a fleet's workers get the model from: a folder, or a function that makes it."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from halotile.decode.folder import class_of, load_vae
from halotile.errors import PlanError, UnsupportedError

Source = str | os.PathLike[str] | Callable[[], Any]
Main = tuple[str | None, str | None]
"""A program's main module as others can import it: its name (of `python -m`), its path; neither in a notebook."""

_main: Main = (None, None)
_importing_main = False


def packed_source(source: Source) -> bytes:
    """`source` as it travels to the workers. Raises what is wrong with it, as far as that shows before it is loaded."""
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source).resolve()
        class_of(folder)
        return pickle.dumps(folder)
    if not callable(source) or isinstance(source, torch.nn.Module):
        raise PlanError(
            f"a fleet loads its model in worker processes: give it a folder or a function that makes the model, not a "
            f"{type(source).__name__}"
        )
    try:
        return pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"the factory cannot be sent to worker processes: {error}; use a function that a module defines by name, "
            "or functools.partial of one (a lambda or a function inside a function has no name to find it by)"
        ) from error


def load_model(source: bytes, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The model on `device`, for inference."""
    with importable(source):
        made = pickle.loads(source)
    if isinstance(made, Path):
        return load_vae(made, device, dtype)
    model = made()
    if isinstance(model, torch.nn.Module):
        model = (model if dtype is None else model.to(dtype)).to(device).eval().requires_grad_(False)
    return model


def main_of_this_program() -> Main:
    """The main module, for workers to import should an argument be defined in it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    return (spec.name if spec is not None else None, os.path.abspath(path) if path is not None else None)


def set_main(main: Main) -> None:
    """In a worker: which main module the program has."""
    global _main  # noqa: PLW0603 - a process has one main module
    _main = main


def check_not_importing_main() -> None:
    """Raise UnsupportedError in a worker that imports a program which would start a fleet of its own thereby."""
    if _importing_main:
        raise UnsupportedError(
            "this program starts a Fleet whenever it is imported, and the workers of a Fleet import it to find its "
            "factory; put what starts the Fleet under `if __name__ == '__main__':`, or the factory into another module"
        )


@contextmanager
def importable(pickled: bytes) -> Iterator[None]:
    """In a worker, to unpickle what the program sent: its main module is imported, once, when something is from there.

    Raises UnsupportedError for what is defined in a notebook or an interactive session.
    """
    if b"__main__" in pickled and _main != (None, None):
        _import_main()
    try:
        yield
    except AttributeError as error:
        raise UnsupportedError(
            f"worker processes cannot find this: {error}; what is defined in a notebook or an interactive session is "
            "known to that process only, so put it into a module file and import it from there"
        ) from error


def _import_main() -> None:
    global _main, _importing_main  # noqa: PLW0603
    (name, path), _main, _importing_main = _main, (None, None), True
    try:
        # as multiprocessing does: under a name that is not __main__, so that what is guarded does not run
        if name is not None:
            contents = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
        else:
            assert path is not None
            contents = runpy.run_path(path, run_name="__mp_main__")
    finally:
        _importing_main = False
    module = ModuleType("__mp_main__")
    module.__dict__.update(contents)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
