"""The naive way to write block-wise training, kept to be measured against.

One module with all layers, `requires_grad` switched per block, a DataLoader with workers, one optimizer and an EMA over
everything at each step, SciPy for the levels. The layers are the project's own, so that what differs is the loop around them.
"""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit import DiT, Layers


class Images(Dataset):
    """uint8 images (N, C, H, W) and their labels, one at a time, as a Dataset has them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index].astype(np.float32) / 127.5 - 1) * 0.66, int(self.labels[index])


def endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns the loader's batches, epoch after epoch."""
    while True:
        yield from loader


def naive_step(
    model: DiT, images: np.ndarray, labels: np.ndarray, *, num_blocks: int, batch_size: int, precision: str
) -> Callable[[], None]:
    """Returns what makes one training step of a random block of a whole model."""
    batches = endless(DataLoader(Images(images, labels), batch_size, shuffle=True, num_workers=2, persistent_workers=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ema = copy.deepcopy(model)
    random = np.random.default_rng(0)
    layers = list(model.layers)
    size = len(layers) // num_blocks
    q = norm.cdf([(np.log(edge) + 1.2) / 1.2 for edge in (0.002, 80)])

    def step() -> None:
        block = random.integers(num_blocks)
        for index, layer in enumerate(layers):
            layer.requires_grad_(bool(index // size == block))
        x, y = next(batches)
        edges = np.linspace(*q, num_blocks + 1)[num_blocks - block - 1 :][:2]
        sigma = torch.tensor(np.exp(-1.2 + 1.2 * norm.ppf(random.uniform(*edges, len(x)))), dtype=torch.float32)
        s = sigma.view(-1, 1, 1, 1)
        z = x + s * torch.randn_like(x)
        y = torch.where(torch.rand(len(y)) < 0.1, 10, y)
        model.layers = Layers(layers[block * size : (block + 1) * size])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = model(z / (s**2 + 0.25).sqrt(), sigma.log() / 4, y).float()
        model.layers = Layers(layers)
        denoised = 0.25 / (s**2 + 0.25) * z + s * 0.5 / (s**2 + 0.25).sqrt() * output
        loss = ((s**2 + 0.25) / (s * 0.5) ** 2 * (denoised - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.mul_(0.999).add_(parameter, alpha=0.001)
        loss.item()

    return step
