"""Augmentation of training images, drawn for each sample of a step, so that a resumed or divided run sees the same images."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms import v2

from hardware import to_device
from randomness import generator, stream_seed


@dataclass(frozen=True)
class Augmentation:
    """Flip, RandAugment and crop of uint8 images.

    Attributes:
        flip: mirror half of the images.
        crop: pixels of black border from which an image of the old size is cut at random; 0: none.
        randaugment: two of torchvision's operations at magnitude 9 (its defaults; Cubuk et al., arXiv 1909.13719).
        view: tells apart several views of the same step.
    """

    flip: bool
    crop: int
    randaugment: bool
    seed: int
    view: int = 0

    def __call__(self, images: Tensor, block: int, step: int, batch_size: int, rows: slice) -> Tensor:
        """Returns the rows of a step, uint8 (n, C, H, W), augmented by draws that belong to block, step, view and sample."""
        draws = generator(self.seed, "augment", block, step, self.view)
        flips = torch.randint(2, (batch_size,), generator=draws).bool()[rows]
        shifts = torch.randint(2 * self.crop + 1, (batch_size, 2), generator=draws)[rows]
        if self.flip:
            images = torch.where(to_device(flips, images.device)[:, None, None, None], images.flip(-1), images)
        if self.randaugment:
            first = rows.indices(batch_size)[0]
            images = torch.stack([self._randaugment(image, block, step, first + i) for i, image in enumerate(images)])
        if self.crop:
            images = crop_at(images, to_device(shifts, images.device), self.crop)
        return images

    def _randaugment(self, image: Tensor, block: int, step: int, sample: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
            torch.manual_seed(stream_seed(self.seed, "randaugment", block, step, self.view, sample))
            return v2.RandAugment()(image)


def crop_at(images: Tensor, shifts: Tensor, border: int) -> Tensor:
    """Cuts an image of the same size out of each image with a border of zeros.

    Args:
        images: (n, C, H, W).
        shifts: (n, 2) rows and columns of the upper left corner, in 0..2 border.
    """
    n, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [border] * 4)
    rows = shifts[:, :1] + torch.arange(height, device=images.device)  # (n, H)
    columns = shifts[:, 1:] + torch.arange(width, device=images.device)  # (n, W)
    samples = torch.arange(n, device=images.device)
    return padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # (n, C, H, W)
