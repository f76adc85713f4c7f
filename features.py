"""The small networks that score digits and Fashion-MNIST, and torch-fidelity's view of one of them.

Two networks per data set, both trained on the train split alone by `python -m experiments.train_classifiers`, which says how:
`features` gives the numbers for FID, KID, precision and recall and the class probabilities for the Inception Score; `labels`,
of another architecture and seed, tells whether a sample shows the class that it was asked for, so that no score judges itself.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_fidelity import FeatureExtractorBase, register_feature_extractor

from config import SettingError

FOLDER = Path(__file__).resolve().parent / "experiments" / "classifiers"
SIZES = {"digits": 8, "fashion_mnist": 28}  # height and width in pixels of the grey images that have networks
NUM_CLASSES = 10
NUM_SHALLOW, NUM_DEEP = 16, 32


def to_unit(images: Tensor) -> Tensor:
    """Returns uint8 images as float32 in [-1, 1], whatever scale the model that made them works in."""
    return images.float() / 127.5 - 1


class FeatureNet(nn.Module):
    """A plain strided convolutional network whose features come from its first and from its last hidden layer.

    The deep layer sees the class and the shape. It barely sees fine texture, which is all that a low-noise block decides, so
    the first layer's responses, averaged over the image, stand beside it. Every feature is scaled to mean 0 and deviation 1
    over the train split, so that neither layer drowns the other.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shallow = nn.Conv2d(1, NUM_SHALLOW, 3, padding=1)
        strides = (2, 2, 1) if size < 16 else (2, 2, 2)
        widths = (NUM_SHALLOW, 24, 32, 48)
        self.middle = nn.ModuleList(
            nn.Conv2d(widths[i], widths[i + 1], 3, stride=stride, padding=1) for i, stride in enumerate(strides)
        )
        self.deep = nn.Linear(48 * math.ceil(size / math.prod(strides)) ** 2, NUM_DEEP)
        self.head = nn.Linear(NUM_DEEP, NUM_CLASSES)
        self.register_buffer("mean", torch.zeros(NUM_SHALLOW + NUM_DEEP))
        self.register_buffer("std", torch.ones(NUM_SHALLOW + NUM_DEEP))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Takes uint8 images (N, 1, H, W)."""
        x = F.relu(self.shallow(to_unit(images)))  # (N, 16, H, W)
        texture = x.mean(dim=(2, 3))  # (N, 16)
        for layer in self.middle:
            x = F.relu(layer(x))  # (N, 24, H/2, W/2), (N, 32, H/4, W/4), (N, 48, h, w)
        deep = self.deep(x.flatten(1))  # (N, 32)
        features = (torch.cat([texture, deep], dim=1) - self.mean) / self.std  # (N, 48)
        return features, self.head(F.relu(deep))  # (N, 48), (N, 10)


class LabelNet(nn.Module):
    """A wide-kernel network with batch normalisation, pooling and a residual layer: the second opinion on a sample's class."""

    def __init__(self, size: int) -> None:
        super().__init__()
        stride = 1 if size < 16 else 2
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 5, stride=stride, padding=2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
        self.residual = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))
        self.head = nn.Linear(64 * 4, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Takes uint8 images (N, 1, H, W)."""
        x = self.wide(self.stem(to_unit(images)))  # (N, 64, h, w)
        x = F.relu(x + self.residual(x))  # (N, 64, h, w)
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))  # (N, 10)


ROLES = {"features": FeatureNet, "labels": LabelNet}


def weights_path(data_name: str, role: str) -> Path:
    """Returns where the committed weights of a data set's network lie."""
    return FOLDER / f"{data_name}_{role}.safetensors"


def load_network(data_name: str, role: str, path: Path | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a network in evaluation mode, on the CPU, and what its file says about how it was made.

    Args:
        data_name: a key of SIZES.
        role: `features` or `labels`.
        path: weights; None: the committed ones.

    Raises:
        SettingError: a file that is missing, broken, or made for another data set, role or architecture.
    """
    path = path or weights_path(data_name, role)
    retrain = f"make it with `python -m experiments.train_classifiers {data_name}`"
    try:
        weights = load_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("made", "{}"))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise SettingError(f"the classifier's weights {path} cannot be read ({error}): {retrain}") from error
    made_for = metadata.get("data"), metadata.get("role")
    if made_for != (data_name, role):
        raise SettingError(f"the classifier's weights {path} were made for {made_for}, not {(data_name, role)}: {retrain}")
    network = ROLES[role](SIZES[data_name])
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise SettingError(f"the classifier's weights {path} do not fit {type(network).__name__}: {retrain}") from error
    return network.eval().requires_grad_(False), metadata


class ClassifierFeatures(FeatureExtractorBase):
    """A data set's `features` network as torch-fidelity asks for one; registered as `classifier-<data set>`."""

    def __init__(
        self, name: str, features_list: list[str], feature_extractor_weights_path: str | None = None, **_: object
    ) -> None:
        super().__init__(name, features_list)
        path = Path(feature_extractor_weights_path) if feature_extractor_weights_path else None
        self.network, _ = load_network(name.removeprefix("classifier-"), "features", path)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return ("features", "logits")

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "logits" if metric == "isc" else "features"

    @staticmethod
    def can_be_compiled() -> bool:
        return False

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        raise NotImplementedError("too small to be worth compiling")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Takes uint8 images (N, 1, H, W)."""
        features, logits = self.network(images)  # (N, 48), (N, 10)
        named = {"features": features, "logits": logits}
        return tuple(named[name] for name in self.features_list)


for _data_name in SIZES:
    register_feature_extractor(f"classifier-{_data_name}", ClassifierFeatures)
