"""Samplers, and the images that are drawn with them.

A sampler is a pure function of a denoiser, noise and a schedule, and does not know that blocks exist.

The probability-flow ODE is dz/dsigma = (z - D(z; sigma)) / sigma; the step from the last level to 0 returns D there, so that
n levels are n evaluations for Euler and 2n - 1 for Heun. (Equations 3 and 4 of the paper print the opposite sign.)
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import latents
import plots
from config import LatentsConfig, SamplerConfig, SettingError, require
from data import to_pixels
from dblock_modules import make_schedule, visits
from hardware import environment
from model import Model
from parallel import ALONE, World
from randomness import generator

Denoiser = Callable[[Tensor, float], Tensor]


def euler(denoiser: Denoiser, noise: Tensor, schedule: np.ndarray) -> Tensor:
    """Euler steps (EDM algorithm 1 without the correction).

    Args:
        denoiser: D(z, sigma), shaped like z.
        noise: (N, ...) standard normal.
        schedule: decreasing levels, float64; the first scales the noise.

    Returns:
        (N, ...) float64, as the state is throughout.
    """
    z = noise.double() * schedule[0]
    for sigma, following in zip(schedule, [*schedule[1:], 0.0], strict=True):
        slope = (z - denoiser(z, float(sigma)).double()) / sigma
        z = z + (following - sigma) * slope
    return z


def heun(denoiser: Denoiser, noise: Tensor, schedule: np.ndarray) -> Tensor:
    """Heun's second-order steps, the last one to 0 Euler's (EDM algorithm 1). Arguments as for `euler`."""
    z = noise.double() * schedule[0]
    for sigma, following in zip(schedule, [*schedule[1:], 0.0], strict=True):
        slope = (z - denoiser(z, float(sigma)).double()) / sigma
        stepped = z + (following - sigma) * slope
        if following > 0:
            corrected = (stepped - denoiser(stepped, float(following)).double()) / following
            stepped = z + (following - sigma) * (slope + corrected) / 2
        z = stepped
    return z


SAMPLERS = {"euler": euler, "heun": heun}


def image_noise(seed: int, indices: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Returns standard normal noise, (len(indices), *shape), in which image i depends on seed and i alone."""
    return torch.stack([torch.randn(shape, generator=generator(seed, "sample", index)) for index in indices]).to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Images from a trained model


def model_schedule(model: Model, settings: SamplerConfig) -> np.ndarray:
    """Returns the levels that the settings ask for on this model's partition; warns where they leave a block out."""
    objective = model.objective
    schedule = make_schedule(settings.schedule, settings.steps, objective.distribution, objective.partition, settings.rho)
    counts = visits(schedule, objective.partition)
    if 0 in counts:
        left_out = [block for block, count in enumerate(counts) if count == 0]
        warnings.warn(
            f"the schedule {settings.schedule} with {settings.steps} steps never visits block {left_out}: "
            "take more steps, or sampler.schedule=per_block",
            stacklevel=2,
        )
    return schedule


def choose_labels(settings: SamplerConfig, num_classes: int, start: int, stop: int) -> Tensor | None:
    """Returns the labels of images start..stop: balanced or the listed ones, in turn; (n,) int64, None without classes."""
    if num_classes == 0:
        return None
    if settings.labels == "balanced":
        wanted: Sequence[int] = range(num_classes)
    else:
        wanted = settings.labels if isinstance(settings.labels, list) else [settings.labels]
    return torch.tensor([wanted[index % len(wanted)] for index in range(start, stop)], dtype=torch.int64)


@torch.inference_mode()
def sample_images(model: Model, settings: SamplerConfig, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Draws images start..stop of the set that the settings describe (by default all of them), in one batch.

    Image i depends on the seed and i alone (but for rounding), not on the batch.

    Returns:
        images: (n, C, H, W) uint8; labels: (n,) int64 or None. Both on the CPU.
    """
    stop = settings.num_images if stop is None else stop
    labels = choose_labels(settings, model.config.data.num_classes, start, stop)
    denoiser = model.denoiser(None if labels is None else labels.to(model.device), settings.guidance)
    noise = image_noise(settings.seed, range(start, stop), model.shape, model.device)
    x = SAMPLERS[settings.name](denoiser, noise, model_schedule(model, settings))
    if isinstance(model.config.data, LatentsConfig):
        return latents.decode(x, model.scale, model.config.data).cpu(), labels
    return to_pixels(x, model.scale).cpu(), labels


def write_images(
    model: Model,
    settings: SamplerConfig,
    folder: Path,
    protocol: dict[str, Any],
    progress: bool = True,
    world: World = ALONE,
) -> Path:
    """Draws the settings' images into a folder, batch by batch; cut off, it goes on after the last whole batch.

    Args:
        protocol: what identifies the images; kept beside them.
        world: the processes that divide the batches among them.

    Returns:
        The path of an .npz with `images` (N, C, H, W) uint8 and `labels` (N,) int64. Beside it `grid.png` and, by
        `format=png`, a file per image in `images/`.
    """
    result = folder / "samples.npz"
    if is_whole(result):
        return result
    batches = folder / "batches"
    with written(folder):
        batches.mkdir(parents=True, exist_ok=True)
    schedule = model_schedule(model, settings)
    # With the environment of the drawing: scores may be computed later, by other code.
    protocol = {
        **protocol,
        "environment": environment(),
        "visits": visits(schedule, model.objective.partition),
        "schedule": schedule.tolist(),
    }
    if world.first:
        with written(folder):
            (folder / "protocol.json").write_text(json.dumps(protocol, indent=1) + "\n")
    files = [batches / f"{index:06d}.npz" for index in range(math.ceil(settings.num_images / settings.batch_size))]
    share = range(world.rank, len(files), world.size)
    for index in tqdm(share, desc="sampling", unit="batch", disable=not (progress and world.first)):
        if not is_whole(files[index]):
            start = index * settings.batch_size
            images, labels = sample_images(model, settings, start, min(start + settings.batch_size, settings.num_images))
            with written(folder):
                save_arrays(files[index], images.numpy(), np.zeros(0, np.int64) if labels is None else labels.numpy())
    world.wait()
    if not world.first:
        return result
    loaded = [load_arrays(file) for file in files]
    images, labels = (np.concatenate(arrays) for arrays in zip(*loaded, strict=True))
    with written(folder):
        plots.image_grid(images[:100], folder / "grid.png", columns=10)
        if settings.format == "png":
            (folder / "images").mkdir(exist_ok=True)
            for index, image in enumerate(images.transpose(0, 2, 3, 1)):
                Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(folder / "images" / f"{index:06d}.png")
        save_arrays(result, images, labels)
        shutil.rmtree(batches)
    return result


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Says in a sentence that the disk does not take what is written; batches that are whole stay."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"the samples in {folder} cannot be written ({error.strerror}): make room, and the same command goes on from here"
        ) from error


def check_room(settings: SamplerConfig, shape: tuple[int, ...], folder: Path) -> None:
    """Refuses more images than a folder's whole disk holds."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    needed, there = settings.num_images * math.prod(shape), shutil.disk_usage(parent).total
    require(
        needed <= there,
        f"sampler.num_images={settings.num_images}: the images take {needed / 1e9:.4g} GB, and the disk of {folder} has "
        f"{there / 1e9:.4g}: draw fewer",
    )


def save_arrays(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes images and labels as one .npz in one move."""
    temporary = path.with_suffix(".tmp.npz")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, images=images, labels=labels)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def is_whole(path: Path) -> bool:
    """Returns whether there is an .npz of images that can be read to its end."""
    try:
        load_arrays(path)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return False
    return True


def load_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns images (N, C, H, W) uint8 and labels (N,) int64 (none: length 0) of an .npz that save_arrays wrote."""
    with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
        return file["images"], file["labels"]
