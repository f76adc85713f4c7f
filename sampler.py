"""Samplers: pure functions of a denoiser, noise and a schedule. They do not know that blocks exist.

The probability-flow ODE is dz/dsigma = (z - D(z; sigma)) / sigma; the step from the last level to 0 returns D there, so that
n levels are n evaluations for Euler and 2n - 1 for Heun. (Equations 3 and 4 of the paper print the opposite sign.)
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from randomness import generator

Denoiser = Callable[[Tensor, float], Tensor]


def euler(denoiser: Denoiser, noise: Tensor, schedule: np.ndarray, on_step: Callable[[], None] | None = None) -> Tensor:
    """Euler steps (EDM algorithm 1 without the correction).

    Args:
        denoiser: D(z, sigma), shaped like z.
        noise: (N, ...) standard normal.
        schedule: decreasing levels, float64; the first scales the noise.
        on_step: called after every step.

    Returns:
        (N, ...) float64, as the state is throughout.
    """
    z = noise.double() * schedule[0]
    for sigma, following in zip(schedule, [*schedule[1:], 0.0], strict=True):
        slope = (z - denoiser(z, float(sigma)).double()) / sigma
        z = z + (following - sigma) * slope
        if on_step:
            on_step()
    return z


def heun(denoiser: Denoiser, noise: Tensor, schedule: np.ndarray, on_step: Callable[[], None] | None = None) -> Tensor:
    """Heun's second-order steps, the last one to 0 Euler's (EDM algorithm 1). Arguments as for `euler`."""
    z = noise.double() * schedule[0]
    for sigma, following in zip(schedule, [*schedule[1:], 0.0], strict=True):
        slope = (z - denoiser(z, float(sigma)).double()) / sigma
        stepped = z + (following - sigma) * slope
        if following > 0:
            corrected = (stepped - denoiser(stepped, float(following)).double()) / following
            stepped = z + (following - sigma) * (slope + corrected) / 2
        z = stepped
        if on_step:
            on_step()
    return z


SAMPLERS = {"euler": euler, "heun": heun}


def image_noise(seed: int, indices: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Returns standard normal noise, (len(indices), *shape), in which image i depends on seed and i alone."""
    return torch.stack([torch.randn(shape, generator=generator(seed, "sample", index)) for index in indices]).to(device)


def balanced_labels(count: int, labels: Sequence[int]) -> Tensor:
    """Returns (count,) int64: the labels repeated in turn, so that any long run of images is balanced."""
    return torch.tensor([labels[index % len(labels)] for index in range(count)], dtype=torch.int64)
