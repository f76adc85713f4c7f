"""Data sets as arrays that are indexed by step.

A set is found (`check_images`), decoded once into a memory-mapped cache (`load_images`), and read by step: which images
step s of block b sees is a pure function (`step_indices`, `step_flips`), and `BatchSource` turns it into tensors.

Pixels are uint8; a model's units are scale * (pixels / 127.5 - 1), so that one noise distribution suits every set.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

import image_sets
from config import Config, SettingError
from hardware import to_device
from image_sets import Split
from randomness import generator

# ------------------------------------------------------------------------------------------------ what the rest of the code sees


@dataclass(frozen=True, eq=False)
class ImageData:
    """A decoded set. `fingerprint` identifies its content: sha256 over both splits' shapes, pixels and labels."""

    name: str
    train: Split
    test: Split
    num_classes: int  # 0 where there are no labels
    scale: float  # model units = scale * (pixels / 127.5 - 1)
    fingerprint: str
    flip: bool  # whether training may mirror an image
    statistics: Path | None = None  # folder in which evaluation keeps what it computes of a split; None: it does not

    @property
    def pixels(self) -> "ImageData":
        """The images that samples are scored against."""
        return self

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width in pixels."""
        return self.train.images.shape[2]

    def normalize(self, images: Tensor) -> Tensor:
        """Returns uint8 images (N, C, H, W) as float32 in model units."""
        return (images.float() / 127.5 - 1) * self.scale

    def heldout(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the first held-out images in model units, and their labels."""
        images, labels = (torch.from_numpy(array[:count].copy()) for array in (self.test.images, self.test.labels))
        return self.normalize(images), labels

    def to_pixels(self, x: Tensor) -> Tensor:
        """Returns images in model units (N, C, H, W) as uint8: the inverse of `normalize`, rounded and clipped."""
        return to_pixels(x, self.scale)


def to_pixels(x: Tensor, scale: float) -> Tensor:
    """Returns images in model units (N, C, H, W) as uint8, rounded and clipped, for a set's scale."""
    return ((x.float() / scale + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def random_images(config: Config) -> ImageData:
    """Returns images of noise, 16 batches of the data's shape in both splits, to measure what their content does not change.

    With two batches an epoch, every other step would draw a new order, which real data do seldom.
    """
    settings, count = config.data, 16 * config.train.batch_size
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, settings.channels, settings.size, settings.size), dtype=np.uint8)
    split = Split(images, generator.integers(0, max(settings.num_classes, 1), count))
    return ImageData("random", split, split, settings.num_classes, settings.scale or 1.0, "", settings.flip)


def check_images(
    *,
    name: str,
    path: str | None,
    size: int,
    image_column: str | None,
    label_column: str | None,
    train_split: str,
    test_split: str,
    flip: bool,
    scale: float | None,
    sigma_data: float,
    cache: str,
) -> None:
    """Finds the data and refuses what cannot work, without decoding an image.

    Fetches Fashion-MNIST's four files if they are nowhere on this machine: that is the only way to know that they can be had.

    Raises:
        SettingError: an unknown name, a missing or unreadable path, a folder in no known layout, a setting that this set does
            not take, a column or split that is not there, a wrong size, a cache that cannot be written, no network.
    """
    image_sets.check_values(name, size, flip, scale, sigma_data, cache)
    image_sets.locate(name, path, size, image_column, label_column, train_split, test_split, Path(cache).expanduser())


def load_images(
    *,
    name: str,
    path: str | None,
    size: int,
    image_column: str | None,
    label_column: str | None,
    train_split: str,
    test_split: str,
    flip: bool,
    scale: float | None,
    sigma_data: float,
    cache: str,
) -> ImageData:
    """Returns a set of square images, decoded at the first call and memory-mapped from then on.

    Images of `image_folder` and `hub` that are not size x size are resized as in ADM and DiT: halved by box filter while the
    shorter side is at least twice `size`, then scaled by Pillow's bicubic filter until it is `size`, then cropped at the
    centre. They are grey if every image of both splits is, else RGB.

    Args:
        name: one of image_sets.NAMES.
        path: a local folder; for `hub` also the name of a Hugging Face set. None: where the named set is usually found.
        size: height and width in pixels; for a set of fixed size, that size.
        image_column: column of a Parquet, Arrow or Hugging Face set. None: found among image_sets.IMAGE_COLUMNS.
        label_column: the same for labels, among image_sets.LABEL_COLUMNS; "none" for a `hub` set without labels.
        train_split: name of the training split (`image_folder`: the subfolder).
        test_split: name of the held-out split. "test" also finds `val`, `validation` and `valid`.
        flip: whether training may mirror images.
        scale: model units per [-1, 1]. None: sigma_data over the train split's measured standard deviation.
        sigma_data: the standard deviation that a measured scale aims at.
        cache: folder for the decoded arrays; `~` is expanded.

    Raises:
        SettingError: as `check_images`, and what decoding finds: a broken image, a label out of range, an empty split.
    """
    image_sets.check_values(name, size, flip, scale, sigma_data, cache)
    folder = Path(cache).expanduser()
    source = image_sets.locate(name, path, size, image_column, label_column, train_split, test_split, folder)
    splits, info = image_sets.cached(source, folder)
    if scale is None:
        if info["std"] == 0:
            raise SettingError(f"data.name={name}: all training pixels are equal, so set data.scale to a number")
        scale = sigma_data / info["std"]
    return ImageData(name, *splits, info["num_classes"], scale, info["fingerprint"], flip)


# ----------------------------------------------------------------------------------------------------- which images a step sees


@functools.lru_cache(maxsize=16)
def _permutation(seed: int, block: int, epoch: int, count: int) -> np.ndarray:
    return torch.randperm(count, generator=generator(seed, "order", block, epoch)).numpy()


def step_indices(seed: int, block: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """Returns which of `count` training images a step sees, int64 (batch_size,).

    Epochs are permutations of their own, laid end to end and cut into batches: no image is dropped or seen twice in an epoch.

    Args:
        seed: of the run.
        block: whose order it is.
        step: the block's own count, from 0.
        batch_size: of the whole step; may exceed `count`.
        count: images in the split.
    """
    start = step * batch_size
    stop = start + batch_size
    return np.concatenate(
        [
            _permutation(seed, block, epoch, count)[max(start - epoch * count, 0) : stop - epoch * count]
            for epoch in range(start // count, (stop - 1) // count + 1)
        ]
    )


def step_flips(seed: int, block: int, step: int, batch_size: int) -> np.ndarray:
    """Returns which images of a step are mirrored, bool (batch_size,), each with probability 1/2."""
    return torch.randint(2, (batch_size,), generator=generator(seed, "flip", block, step)).bool().numpy()


class Source(Protocol):
    """What the training loop asks of data."""

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Returns the rows of a step's batch, on the device."""
        ...

    def prefetch(self, block: int, step: int, batch_size: int) -> None:
        """Announces the step that comes next."""
        ...


Augment = Callable[[Tensor, int, int, int, slice], Tensor]


class BatchSource:
    """Training batches by block and step.

    A split of up to `resident_bytes` lives on the device as uint8. A larger one stays a memory map, and one background thread
    gathers the step that was announced; what is returned is the same to the bit.
    """

    def __init__(
        self,
        data: ImageData,
        device: torch.device | str,
        *,
        seed: int,
        augment: Augment | None = None,
        resident_bytes: int = 2**31,
    ) -> None:
        """Takes what augments the rows of a step, uint8 (n, C, H, W): called with block, step, batch_size and rows."""
        self.data = data
        self.augment = augment
        self.device = torch.device(device)
        self.seed = seed
        self._resident: tuple[Tensor, Tensor] | None = None
        if data.train.images.nbytes <= resident_bytes:
            images, labels = (torch.from_numpy(np.array(array)) for array in (data.train.images, data.train.labels))
            self._resident = images.to(self.device), labels.to(self.device)
        else:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
            self._gathered: OrderedDict[tuple[int, int, int], Future] = OrderedDict()

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Returns the `rows` part of a step's batch, on the device.

        Args:
            block: which block is trained.
            step: the block's own count, from 0.
            batch_size: of the whole step, so that a micro-batch or a process's share has the order and flips of the whole.
            rows: the part to return.

        Returns:
            x: float32 (n, C, H, W) in model units, mirrored where the step's flips say so and the set allows it.
            labels: int64 (n,).
        """
        images, labels = self._pixels(block, step, batch_size, rows)
        if self.augment is not None:
            images = self.augment(images, block, step, batch_size, rows)
        x = self.data.normalize(to_device(images, self.device))
        if self.data.flip:
            flips = to_device(torch.from_numpy(step_flips(self.seed, block, step, batch_size)[rows]), self.device)
            x = torch.where(flips[:, None, None, None], x.flip(-1), x)
        return x, to_device(labels, self.device)

    def prefetch(self, block: int, step: int, batch_size: int) -> None:
        """Starts to gather a coming step in the background. A failure there is raised by the `batch` that asks for the step."""
        key = (block, step, batch_size)
        if self._resident is not None or key in self._gathered:
            return
        self._gathered[key] = self._thread.submit(self._gather, self._indices(*key))
        while len(self._gathered) > 2:  # the step that is being read in micro-batches, and the next
            self._gathered.popitem(last=False)

    def _pixels(self, block: int, step: int, batch_size: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns images uint8 (n, C, H, W) and labels of a step, on the device or on the host."""
        if self._resident is not None:
            indices = to_device(torch.from_numpy(self._indices(block, step, batch_size)[rows]), self.device)
            return self._resident[0][indices], self._resident[1][indices]
        announced = self._gathered.get((block, step, batch_size))
        if announced is None:
            return self._gather(self._indices(block, step, batch_size)[rows])
        images, labels = announced.result()
        return images[rows], labels[rows]

    def _indices(self, block: int, step: int, batch_size: int) -> np.ndarray:
        return step_indices(self.seed, block, step, batch_size, len(self.data.train.labels))

    def _gather(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        split = self.data.train
        images, labels = (torch.from_numpy(np.asarray(array[indices])) for array in (split.images, split.labels))
        if self.device.type == "cuda":  # only pinned memory is copied while the device computes
            return images.pin_memory(), labels.pin_memory()
        return images, labels
