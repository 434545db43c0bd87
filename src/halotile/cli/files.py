"""The files a command reads and writes: checked before work starts, replaced whole or not at all."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from halotile.errors import HalotileError

Kind = Literal["picture", "clip"]
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
CLIP_SUFFIXES = (".mp4", ".mkv", ".mov", ".m4v")
READABLE_CLIP_SUFFIXES = (*CLIP_SUFFIXES, ".webm", ".avi")


class FileError(HalotileError, OSError):
    """A file or folder that cannot be read or written. The message names it and the reason."""

    def __str__(self) -> str:
        return str(self.args[0])


def kind_of_input(path: Path) -> Kind:
    """Whether the name says picture or clip; raises `FileError` for any other suffix."""
    return _kind(path, READABLE_CLIP_SUFFIXES)


def kind_of_output(path: Path) -> Kind:
    """Whether a picture or a clip would be written; raises `FileError` for any other suffix."""
    return _kind(path, CLIP_SUFFIXES)


def check_readable(path: Path) -> None:
    """Raise `FileError` unless `path` is a file with something in it that this user may read."""
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if not path.is_file():
        raise FileError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise FileError(f"{path}: no permission to read it")
    if path.stat().st_size == 0:
        raise FileError(f"{path}: the file is empty")


def check_writable(path: Path) -> None:
    """Raise `FileError` unless a file can be made beside `path`, so that no work is done for nothing."""
    if path.is_dir():
        raise FileError(f"{path}: is a folder, name a file")
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".halotile-"):
            pass
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path` and with its suffix; renamed to `path` on success and removed on failure."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        with _signals_raise():
            yield part
        os.replace(part, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with staged(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The launcher stops ranks with signals, which would skip the clean-up of a file that is being written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kind(path: Path, clip_suffixes: tuple[str, ...]) -> Kind:
    suffix = path.suffix.lower()
    if suffix in PICTURE_SUFFIXES:
        return "picture"
    if suffix in clip_suffixes:
        return "clip"
    known = " ".join(PICTURE_SUFFIXES + clip_suffixes)
    raise FileError(f"{path}: the suffix {suffix or '(none)'} is neither a picture's nor a clip's; known: {known}")
