"""Image generation, from settings to scores: data, objective, pictures during training, samples, results.

The pipeline calls these functions for a DiT; another kind of model brings its own under the same names.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import data as data_sets
import evaluation
import latents
import plots
import sampler
from config import Config, LatentsConfig, SamplerConfig, digest, require
from data import BatchSource, ImageData
from dblock_modules import karras_schedule
from evaluation import LossGrid
from hardware import Hardware
from latents import LatentData, LatentSource
from model import Model, build_model, build_objective
from parallel import ALONE, World

GRID_IMAGES = 40  # of the pictures that are drawn during training


def check(config: Config) -> None:
    """Refuses what cannot work as far as it can be known without work: data, features."""
    latent = isinstance(config.data, LatentsConfig)
    if latent:
        scores = config.mode in ("run", "evaluate") and config.eval.features is not None
        latents.check(config.data, decodes=config.mode != "train", scores=scores)
    else:
        data_sets.check_images(**image_settings(config))
    if config.mode in ("run", "evaluate") and config.train.blocks == "all" and config.eval.features is not None:
        evaluation.check_scores(
            config.data.name,
            image_shape(config),
            features=config.eval.features,
            inception_weights=config.eval.inception_weights,
            num_samples=config.sampler.num_images,
        )
    dimensions = config.data.channels * config.data.size**2
    require(
        config.eval.likelihood_images == 0 or dimensions <= evaluation.MAX_DIMENSIONS,
        f"eval.likelihood_images={config.eval.likelihood_images}: the exact divergence takes at most "
        f"{evaluation.MAX_DIMENSIONS} dimensions, these images have {dimensions}",
    )


def image_shape(config: Config) -> tuple[int, int, int]:
    """Returns channels, height and width of the images that are drawn, which latents are decoded to."""
    if isinstance(config.data, LatentsConfig):
        return 3, config.data.image_size, config.data.image_size
    return config.data.channels, config.data.size, config.data.size


def image_settings(config: Config) -> dict[str, Any]:
    """Returns data.load_images's arguments."""
    settings = dataclasses.asdict(config.data)
    for key in ("channels", "num_classes", "crop", "randaugment"):
        del settings[key]
    return {**settings, "sigma_data": config.objective.sigma_data}


def load(config: Config) -> ImageData | LatentData:
    """Loads the data and checks that they are what the model is built for."""
    if isinstance(config.data, LatentsConfig):
        return latents.load(config.data, config.objective.sigma_data)
    data = data_sets.load_images(**image_settings(config))
    require(data.channels == config.data.channels, f"data.channels={config.data.channels}: the images have {data.channels}")
    require(
        config.data.num_classes in (0, data.num_classes),
        f"data.num_classes={config.data.num_classes}: the data have {data.num_classes}",
    )
    return data


def source(config: Config, data: ImageData | LatentData, device: torch.device) -> BatchSource:
    """Returns what gives each training step its batch."""
    if isinstance(data, LatentData):
        return LatentSource(data, device, seed=config.seed)
    return BatchSource(data, device, seed=config.seed)


def stand_in(config: Config) -> ImageData:
    """Returns random data for measurements that do not depend on what they show."""
    return data_sets.random_images(config)


def one_evaluation(
    config: Config, block: int, modules: Mapping[str, nn.Module], hardware: Hardware
) -> tuple[Callable[[], Tensor], int]:
    """Returns what runs a block's denoiser once, for as many samples as a training step has, and how often sampling does."""
    model = build_model(config, modules, 1.0, hardware)
    size, drawn = config.train.batch_size, config.sampler
    labels = torch.zeros(size, dtype=torch.int64, device=hardware.device) if config.data.num_classes else None
    denoise = model.denoiser(labels, drawn.guidance)
    sigma = math.sqrt(math.prod(model.objective.partition.interval(block)))
    z = torch.randn(size, *model.shape, device=hardware.device)
    evaluations = drawn.steps if drawn.name == "euler" else 2 * drawn.steps - 1
    return torch.inference_mode()(lambda: denoise(z, sigma)), evaluations


def plot_partition(config: Config, path: Path) -> None:
    """Draws the density of the levels, the blocks' intervals and their overlap."""
    objective = build_objective(config)
    intervals = [objective.interval(block) for block in range(objective.partition.num_blocks)]
    plots.plot_partition(objective.distribution, objective.partition.edges, intervals, path)


def preview(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware, path: Path) -> None:
    """Draws a few samples of a model in training."""
    model = build_model(config, modules, scale, hardware)
    images, _ = sampler.sample_images(model, dataclasses.replace(config.sampler, num_images=GRID_IMAGES))
    plots.image_grid(images, path, columns=10)


def sample_sets(config: Config) -> Iterator[SamplerConfig]:
    """Yields the settings of every set of samples that is scored: for each guidance scale its repeats."""
    if config.eval.features is not None:
        for guidance in config.eval.guidance or [config.sampler.guidance]:
            for repeat in range(config.eval.repeats):
                yield dataclasses.replace(config.sampler, guidance=guidance, seed=config.sampler.seed + repeat)


def sample(
    config: Config, model: Model, weights: dict[str, Any], folder: Path, settings: SamplerConfig, world: World = ALONE
) -> Path:
    """Draws the settings' images and returns the path of their .npz; `weights` says what made them."""
    if isinstance(config.data, LatentsConfig):
        latents.load_vae(config.data.vae, model.device)  # what cannot be decoded is not drawn
    protocol = {"sampler": dataclasses.asdict(settings), **weights}
    guidance = settings.guidance if isinstance(settings.guidance, int | float) else "list"
    name = f"guidance_{guidance:g}" if guidance != "list" else "guidance_list"
    key = digest(protocol, 8)
    return sampler.write_images(model, settings, folder / "samples" / f"{name}_{key}", protocol, config.log.progress, world)


def evaluate(
    config: Config, data: ImageData, model: Model, weights: dict[str, Any], folder: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """Scores a trained model; returns results, each with `kind`, `title`, `scores` and `protocol`."""
    results = [heldout_result(config, data, model, folder)]
    if config.eval.likelihood_images:
        results.append(likelihood_result(config, data, model))
    if config.eval.features is not None:
        for split in ("train", "test") if config.eval.split == "both" else (config.eval.split,):
            for guidance in config.eval.guidance or [config.sampler.guidance]:
                results.append(sample_result(config, data, model, weights, folder, hardware, split, guidance))
            settings = feature_settings(config, hardware)
            floor = evaluation.floor_scores(data.pixels, split=split, num_samples=config.sampler.num_images, **settings)
            results.append({"kind": "floor", "title": f"floor, {split}", **floor})
    return results


def heldout(config: Config, data: ImageData, count: int) -> tuple[Tensor, Tensor | None]:
    """Returns the first held-out images in model units and their labels (None for an unconditional model)."""
    x, labels = data.heldout(count)
    return x, labels if config.data.num_classes else None


def labelled(model: Model) -> evaluation.Denoise:
    """Returns D(z, sigma, labels) of a model without guidance, as the scores ask for it."""
    return lambda z, sigma, labels: model.denoiser(labels)(z, sigma)


def measure(config: Config, modules: Mapping[str, nn.Module], data: ImageData, hardware: Hardware) -> dict[str, Any]:
    """Returns the held-out loss of a model in training, see evaluation.summarize_loss; `blocks` has each one's mean."""
    grid, loss, owners = heldout_loss(config, data, build_model(config, modules, data.scale, hardware))
    summary = evaluation.summarize_loss(loss, grid, owners)
    return {**summary, "blocks": [block["loss"] for block in summary["blocks"]], "protocol": loss_protocol(config, data)}


def loss_protocol(config: Config, data: ImageData) -> dict[str, Any]:
    """Returns on what a held-out loss is measured."""
    images = min(config.eval.loss_images, len(data.test.images))
    return {"images": images, "split": "test", "levels": config.eval.loss_levels, "seed": config.eval.seed}


def heldout_loss(config: Config, data: ImageData, model: Model) -> tuple[LossGrid, np.ndarray, list[int]]:
    """Weighted denoising loss on held-out images, on a grid of levels with the same noise for every model.

    Returns:
        The grid of L levels, the loss at each, (L,), and the block that owns it.
    """
    settings, objective = config.eval, model.objective
    x, labels = heldout(config, data, settings.loss_images)
    x, labels = x.to(model.device), None if labels is None else labels.to(model.device)
    grid = evaluation.loss_grid(objective.distribution, settings.loss_levels)
    loss = evaluation.heldout_loss(
        labelled(model), x, labels, grid, sigma_data=objective.sigma_data, batch_size=settings.batch_size, seed=settings.seed
    )
    return grid, loss, [objective.partition.block_of(level) for level in grid.levels]


def heldout_result(config: Config, data: ImageData, model: Model, folder: Path) -> dict[str, Any]:
    """Held-out loss by level, by block and integrated, with its plot."""
    grid, loss, owners = heldout_loss(config, data, model)
    (folder / "plots").mkdir(exist_ok=True)
    path = folder / "plots" / "loss_by_level.png"
    plots.plot_loss_by_level({config.method.name: (grid.levels, loss)}, model.objective.partition.edges, path)
    return {
        "kind": "heldout_loss",
        "title": "held-out loss",
        "scores": evaluation.summarize_loss(loss, grid, owners),
        "by_level": {"levels": grid.levels.tolist(), "mass": grid.mass.tolist(), "loss": loss.tolist()},
        "protocol": {
            "metric": "EDM-weighted squared error, mean over dimensions and images",
            **loss_protocol(config, data),
        },
    }


def likelihood_result(config: Config, data: ImageData, model: Model) -> dict[str, Any]:
    """Log-likelihood of held-out images by the probability-flow ODE."""
    settings = config.eval
    x, labels = heldout(config, data, settings.likelihood_images)
    x, labels = x.to(model.device), None if labels is None else labels.to(model.device)
    levels = model.objective.distribution
    schedule = karras_schedule(settings.likelihood_steps, levels.minimum, levels.maximum)
    found = evaluation.log_likelihood(labelled(model), x, labels, schedule, batch_size=settings.batch_size)
    return {
        "kind": "likelihood",
        "title": "likelihood",
        "scores": {"nats": float(found.nats.mean()), "bits_per_dimension": float(found.bits_per_dimension.mean())},
        "protocol": {
            **evaluation.LIKELIHOOD_PROTOCOL,
            "images": len(x),
            "split": "test",
            "schedule": "karras",
            "steps": settings.likelihood_steps,
        },
    }


def feature_settings(config: Config, hardware: Hardware) -> dict[str, Any]:
    """Returns the arguments that sample_scores and floor_scores share, but for the split."""
    return {
        "features": config.eval.features,
        "inception_weights": config.eval.inception_weights,
        "batch_size": config.eval.batch_size,
        "device": hardware.device,
        "seed": config.eval.seed,
    }


def sample_result(
    config: Config,
    data: ImageData,
    model: Model,
    weights: dict[str, Any],
    folder: Path,
    hardware: Hardware,
    split: str,
    guidance: float | list[float],
) -> dict[str, Any]:
    """Scores samples at one guidance against one split, over eval.repeats sets of samples."""
    sets = []
    for settings in sample_sets(config):
        if settings.guidance != guidance:
            continue
        path = sample(config, model, weights, folder, settings)
        images, labels = sampler.load_arrays(path)
        scored = evaluation.sample_scores(
            images, labels if len(labels) else None, data.pixels, split=split, **feature_settings(config, hardware)
        )
        drawn = json.loads((path.parent / "protocol.json").read_text())
        sets.append({**scored, "images": str(path.parent.relative_to(folder)), "drawn_by": drawn["environment"]})
    names = [name for name in sets[0]["scores"] if all(one["scores"][name] is not None for one in sets)]
    return {
        "kind": "samples",
        "title": f"guidance {guidance}, {split}",
        "scores": {name: evaluation.repeat_summary([one["scores"][name] for one in sets]) for name in names},
        "sets": [{key: one[key] for key in ("scores", "images", "drawn_by")} for one in sets],
        "protocol": {
            **sets[0]["protocol"],
            "sampler": dataclasses.asdict(dataclasses.replace(config.sampler, guidance=guidance)),
            "visits": drawn["visits"],
            "repeats": config.eval.repeats,
        },
    }
