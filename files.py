"""Small things that whoever writes or compares files needs."""

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import SettingError


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one move, on the disk before it has its name."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def checksum(path: Path) -> str:
    """Returns the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Returns `field: ours against theirs` for every leaf in which two descriptions differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(ours.keys() | theirs.keys()):
            found += differences(ours.get(key), theirs.get(key), f"{name}.{key}".lstrip("."))
        return found
    return [] if ours == theirs else [f"{name} is {ours} here and {theirs} there"]


def check_cache(cache: str) -> None:
    """Refuses a folder for decoded data that cannot be written; `~` is expanded."""
    folder = Path(cache).expanduser()
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise SettingError(f"data.cache={cache} cannot be written, because of {existing}: name a folder that can")


def publish(made: Path, target: Path, is_whole: Callable[[], bool]) -> None:
    """Moves a finished folder to its place in one step. Another process's whole folder stays; a broken one is moved away."""
    for _ in range(10):
        try:
            made.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if is_whole():
            return
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            target.rename(made.with_name(f"broken_{uuid.uuid4().hex}"))
    raise SettingError(f"data.cache: {target} cannot be replaced: remove it, or name another folder")
