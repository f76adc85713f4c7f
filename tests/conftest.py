"""What the tests share: small configurations, composed in Python or by the command line, on real digits."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

import config as configuration
import generation
from config import (
    CNNConfig,
    Config,
    DataConfig,
    LabelConfig,
    MethodConfig,
    ModelConfig,
    ObjectiveConfig,
    PartitionConfig,
    TrainConfig,
    ViTConfig,
)
from data import ImageData

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # exact comparisons hold at equal thread counts, and two test processes share two cores


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for decoded data sets."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def digits(cache: Path) -> ImageData:
    """The digits, in model units of standard deviation .5."""
    return generation.load(make_config(cache=cache))


@pytest.fixture(scope="session")
def inception_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights in the place of Inception's; a test that uses it sets evaluation.INCEPTION_SHA256 to its own."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        torch.save({}, path)
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture(scope="session")
def images_and_vaes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 training and 12 test images of two classes, of other sizes than 16x16; VAEs that make latents of 4x8x8 of those."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("latents")
    random = np.random.default_rng(0)
    for split, count in (("train", 13), ("val", 6)):
        for name in ("cat", "dog"):
            (folder / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                coarse = Image.fromarray(random.integers(0, 256, (3, 4, 3), dtype=np.uint8))
                coarse.resize((40, 28 + index), Image.Resampling.BICUBIC).save(folder / "images" / split / name / f"{index}.png")
    for name, seed in (("vae", 0), ("other_vae", 1)):
        torch.manual_seed(seed)
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            scaling_factor=0.7,
        ).save_pretrained(folder / name)
    return folder


def make_config(cache: Path | str = "unused", **groups: dict) -> Config:
    """Returns a resolved configuration of a tiny 3-layer DiT on digits; groups update its fields."""
    config = Config(
        data=DataConfig("digits", size=8, channels=1, num_classes=10, cache=str(cache)),
        model=ModelConfig("dit", "digits", patch_size=4, depth=3, width=16, heads=2),
        objective=ObjectiveConfig(),
        method=MethodConfig("diffusion_blocks"),
        partition=PartitionConfig("equi_probability", num_blocks=3, overlap=0.05),
        train=TrainConfig(steps=4, batch_size=8, precision="fp32", log_every=2, checkpoint_every=1000, sample_every=0),
    )
    return resolved(config, groups)


def resolved(config: Config, groups: dict) -> Config:
    """Returns a configuration with groups' fields updated, resolved."""
    for name, values in groups.items():
        group = getattr(config, name)
        setattr(config, name, dataclasses.replace(group, **values) if dataclasses.is_dataclass(group) else values)
    return configuration.resolve(config)


def make_classifier(method: str = "diffusion_blocks", network: str = "vit", **groups: dict) -> Config:
    """Returns a resolved configuration of a tiny 3-layer ViT, or of NoProp's network, on digits; groups update its fields."""
    config = Config(
        data=DataConfig("digits", size=8, channels=1, num_classes=10, crop=1),
        model=ViTConfig("vit", "digits", patch_size=4, depth=3, width=16, heads=2) if network == "vit" else CNNConfig(hidden=16),
        objective=LabelConfig(networks=3),
        method=MethodConfig(method),
        partition=PartitionConfig("equi_probability", num_blocks=3, overlap=0.05),
        train=TrainConfig(steps=4, batch_size=8, precision="fp32", log_every=2, checkpoint_every=3),
    )
    config.log.progress, config.eval.loss_levels, config.eval.loss_images = False, 8, 40
    return resolved(config, {"threads": 1, "device": "cpu", **groups})


def command_line(*overrides: str, cwd: Path, expect: int | None = 0, timeout: float = 240) -> subprocess.CompletedProcess:
    """Runs main.py in a folder of its own with one thread, and checks its exit status (None: any but 0)."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "main.py"), "threads=1", "log.progress=false", *overrides],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    wrong = result.returncode == 0 if expect is None else result.returncode != expect
    assert not wrong, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


TINY = ("model.depth=3", "model.width=16", "model.patch_size=4", "train.steps=4", "train.batch_size=8", "train.precision=fp32")
TINY += ("train.log_every=2", "train.sample_every=0", "sampler.num_images=60", "sampler.steps=4", "sampler.schedule=per_block")
TINY += ("eval.loss_levels=8", "eval.loss_images=40")
