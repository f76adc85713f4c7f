"""One source of randomness: everything that is drawn comes from a hash of what it is drawn for.

A draw is named by (seed, purpose, keys...), for example (0, "noise", block, step). Nothing has to be saved to repeat it, and
drawing one thing never moves another.
"""

import hashlib

import torch


def stream_seed(seed: int, purpose: str, *keys: int) -> int:
    """Returns the 63-bit seed of the stream that belongs to `purpose` and `keys`."""
    name = "/".join([str(int(seed)), purpose, *(str(int(key)) for key in keys)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a fresh generator at the start of that stream. Streams of a CPU and of a GPU differ."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, purpose, *keys))
