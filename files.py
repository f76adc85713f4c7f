"""Small things that whoever writes or compares files needs."""

import hashlib
import os
from pathlib import Path
from typing import Any


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
