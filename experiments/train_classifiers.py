"""Trains the classifiers behind the scores of digits and Fashion-MNIST and writes experiments/classifiers/.

    python -m experiments.train_classifiers digits           # half a minute on one core
    python -m experiments.train_classifiers fashion_mnist    # 4 minutes

The train split alone is seen; the test split gives the accuracy that is written into the file. One thread and fixed seeds: the
same machine and library versions write the same bytes. Scores by other weights belong into another column: retrain with reason.
"""

import argparse
import json
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import trange

from data import ImageData, load_images
from features import ROLES, SIZES, FeatureNet, weights_path
from randomness import generator, stream_seed


class Recipe(NamedTuple):
    """How the networks of one data set are trained: AdamW, one cycle of the learning rate, cross-entropy."""

    epochs: int
    batch_size: int
    learning_rate: float
    shift: int  # largest random translation in pixels


RECIPES = {"digits": Recipe(150, 128, 5e-3, shift=1), "fashion_mnist": Recipe(6, 256, 4e-3, shift=0)}
SEEDS = {"features": 0, "labels": 1}


def translate(images: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """Moves each image (N, 1, H, W) by up to `most` pixels along both axes, black coming in from outside."""
    count, _, height, width = images.shape
    padded = F.pad(images[:, 0], (most,) * 4)  # (N, H + 2 most, W + 2 most)
    down, right = torch.randint(2 * most + 1, (2, count, 1), generator=draw)  # (N, 1) each
    rows, columns = down + torch.arange(height), right + torch.arange(width)  # (N, H), (N, W)
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]


def train(role: str, images: Tensor, labels: Tensor, recipe: Recipe, seed: int) -> nn.Module:
    """Returns a network of that role, trained on uint8 images (N, 1, H, W) and labels (N,), in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "classifier_init"))
        network = ROLES[role](images.shape[-1])
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    steps = recipe.epochs * math.ceil(len(labels) / recipe.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps)
    network.train()
    for epoch in trange(recipe.epochs, desc=role, unit="epoch"):
        draw = generator(seed, "classifier_batches", epoch)
        for index in torch.randperm(len(labels), generator=draw).split(recipe.batch_size):
            output = network(translate(images[index], recipe.shift, draw))
            logits = output[1] if role == "features" else output
            loss = F.cross_entropy(logits, labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(False)


def standardize(network: FeatureNet, images: Tensor) -> None:
    """Sets the features' mean and deviation to those over the train split, uint8 (N, 1, H, W)."""
    features = torch.cat([network(batch)[0] for batch in images.split(1000)]).double()
    network.mean.copy_(features.mean(0))
    network.std.copy_(features.std(0))


def accuracy(network: nn.Module, role: str, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images (N, 1, H, W) that get their label."""
    outputs = [network(batch) for batch in images.split(1000)]
    logits = torch.cat([output[1] if role == "features" else output for output in outputs])
    return (logits.argmax(1) == labels).double().mean().item()


def make(data: ImageData, role: str) -> str:
    """Trains and writes the network of one role; returns a line that says how well it does."""
    images, labels, test_images, test_labels = (
        torch.tensor(array) for split in (data.train, data.test) for array in (split.images, split.labels)
    )
    recipe, seed = RECIPES[data.name], SEEDS[role]
    network = train(role, images, labels, recipe, seed)
    if role == "features":
        standardize(network, images)
    score = accuracy(network, role, test_images, test_labels)
    made = {
        "data": data.name,
        "role": role,
        "data_fingerprint": data.fingerprint,
        "train_images": len(labels),
        "test_images": len(test_labels),
        "test_accuracy": round(score, 4),
        "recipe": recipe._asdict(),
        "seed": seed,
        "torch": torch.__version__,
        "command": f"python -m experiments.train_classifiers {data.name}",
    }
    path = weights_path(data.name, role)
    path.parent.mkdir(exist_ok=True)
    # One key, since safetensors writes several in an order that changes from run to run.
    save_file(network.state_dict(), path, metadata={"made": json.dumps(made)})
    return f"{path.name}: test accuracy {score:.4f}, {path.stat().st_size / 1000:.0f} kB"


def main() -> None:
    """Makes both networks of the data set that the command line names."""
    parser = argparse.ArgumentParser(description="Train the classifiers that score samples of a data set.")
    parser.add_argument("data", choices=SIZES)
    parser.add_argument("--cache", default="~/.cache/diffusion_blocks", help="folder of decoded data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load_images(
        name=arguments.data,
        path=None,
        size=SIZES[arguments.data],
        image_column=None,
        label_column=None,
        train_split="train",
        test_split="test",
        flip=False,
        scale=None,
        sigma_data=0.5,
        cache=arguments.cache,
    )
    for role in ROLES:
        print(make(data, role))


if __name__ == "__main__":
    main()
