"""Classification, from settings to scores: a network that denoises the embedding of its label, and the other methods' kind.

DiffusionBlocks (arXiv 2506.14202, appendix B): z = embedding of the label + sigma eps; a block is given z, sigma and the image
and predicts the label's distribution; between blocks the expected embedding under that distribution is the denoised value.

The pipeline calls these functions for a classifier, as it calls `generation` for a DiT.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import baselines
import config as configuration
import data as data_sets
import image_sets
import plots
from augmentation import Augmentation
from baselines import READOUT, SHARED, Inference, NoProp, NoPropCNN, NoPropShared, TwoViews
from config import IMAGE_STD, Config, require
from data import BatchSource, ImageData
from dblock_modules import LevelDistribution, Partition, make_schedule, precondition, sample_interval, visits, widen_log
from evaluation import loss_grid
from hardware import Hardware
from image_sets import Split
from model import (
    Autocast,
    Batch,
    Draw,
    LearnedTable,
    bridge,
    cross_entropy_weight,
    draw_noise,
    dropout_stream,
    fixed_table,
    part_name,
    step_memory,
)
from randomness import generator, stream_seed
from sampler import euler, image_noise
from vit import DiTLayer, LabelEnds, LabelViT, Layers, Tokens, ViT, initialize

INFORMATION_DRAWS = 8192  # of the noisy embedding, for what it gives away by itself
IGNORED = 0.01  # nats: a block that loses less than that on other images' labels does not look at its image
TOP = 5


# ---------------------------------------------------------------------------------------------------------------------
# The objective of DiffusionBlocks


class Shared(nn.Module):
    """What all blocks train together, where that is asked for: the ends of the ViT, the target table."""

    def __init__(self, ends: LabelEnds | None, table: LearnedTable | None) -> None:
        super().__init__()
        self.ends, self.table = ends, table


@dataclass(frozen=True)
class LabelDiffusion:
    """Denoising of the label's embedding by weighted cross-entropy.

    Attributes:
        distribution: training distribution of sigma.
        partition: which block owns which levels.
        overlap: the exponent gamma by which a block's training interval is widened.
        sigma_data: of EDM's preconditioning.
        weighting: see model.cross_entropy_weight.
        fixed: target embeddings (classes, D), or None where they are learned.
        skip: whether the token is denoised by EDM's formula before it is read out (see vit.LabelViT).
        shared_ends: whether embeddings and head belong to the shared part.
        seed: of all draws.
    """

    distribution: LevelDistribution
    partition: Partition
    overlap: float
    sigma_data: float
    weighting: str
    fixed: Tensor | None
    skip: bool
    shared_ends: bool
    seed: int

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of the levels that a block is trained on, overlap included."""
        return widen_log(*self.partition.interval(block), self.overlap, self.distribution.minimum, self.distribution.maximum)

    def table(self, modules: Mapping[str, nn.Module], device: torch.device) -> Tensor:
        """Returns the target embeddings, (classes, D), on a device."""
        return modules[SHARED].table() if self.fixed is None else self.fixed.to(device)

    def backbone(self, modules: Mapping[str, nn.Module], block: int) -> nn.Module:
        """Returns a block's network F(z_in, c_noise, images, skip) -> logits."""
        own = modules[part_name(block)]
        return LabelViT(modules[SHARED].ends, own) if self.shared_ends else own

    def logits(
        self, modules: Mapping[str, nn.Module], block: int, z: Tensor, sigma: Tensor, images: Tensor, autocast: Autocast
    ) -> Tensor:
        """Returns a block's prediction, (N, classes) float32, from noisy embeddings z (N, D), sigma (N,) and images."""
        c = precondition(sigma.float()[:, None], self.sigma_data)
        skip = (c.c_skip * z, c.c_out) if self.skip else None
        with autocast or nullcontext():
            return self.backbone(modules, block)(c.c_in * z, c.c_noise[:, 0], images, skip).float()

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the weighted cross-entropy per sample, (n,), of images (n, C, H, W) and labels (n,); see model.Objective."""
        images, labels = batch
        y = self.table(modules, images.device)[labels]  # (n, D)
        uniform, noise = draw_noise(y, draw, self.seed)
        sigma = sample_interval(self.distribution, *self.interval(draw.block), uniform)  # (batch_size,)
        weight = cross_entropy_weight(self.weighting, sigma, self.sigma_data)[draw.rows]  # (n,)
        own = sigma[draw.rows]
        z = y + own.float()[:, None] * noise[draw.rows]  # (n, D)
        with dropout_stream(self.seed, draw):
            logits = self.logits(modules, draw.block, z, own, images, autocast)
        return weight * F.cross_entropy(logits, labels, reduction="none")

    def schedule(self, inference: Inference) -> np.ndarray:
        """Returns the levels of a prediction: by default one for each block, from its upper edge."""
        steps = inference.steps or self.partition.num_blocks
        return make_schedule(inference.schedule, steps, self.distribution, self.partition)

    def predict(self, modules: Mapping[str, nn.Module], images: Tensor, inference: Inference, autocast: Autocast) -> Tensor:
        """Returns the logits of each Euler step, (steps, N, classes); the last is the prediction.

        From noise, Euler's path ends at a *draw* of the label from what the model believes; from the noise's mean it ends at
        the likeliest label. The default starts there.
        """
        table = self.table(modules, images.device)
        if inference.bridge == "raw" and self.fixed is None:
            bridge_table, name = modules[SHARED].table.weight, "soft"
        else:
            bridge_table, name = table, "soft" if inference.bridge == "raw" else inference.bridge
        found: list[Tensor] = []

        def denoise(z: Tensor, sigma: float) -> Tensor:
            levels = torch.full((len(z),), sigma, dtype=torch.float64, device=z.device)
            block = self.partition.block_of(sigma)
            found.append(self.logits(modules, block, z.float(), levels, images, autocast))
            return bridge(found[-1], bridge_table, name, inference.top_k)

        if inference.initial_noise:
            indices = range(inference.first, inference.first + len(images))
            start = inference.initial_noise * image_noise(inference.seed, indices, table.shape[1:], images.device)
        else:
            start = torch.zeros(len(images), table.shape[1], device=images.device)
        euler(denoise, start, self.schedule(inference))
        return torch.stack(found)


# ---------------------------------------------------------------------------------------------------------------------
# From a configuration to parts, objective, model


def has_shared(config: Config) -> bool:
    """Returns whether there is a part that every block's steps train."""
    ends = config.model.name == "vit" and config.model.share == "ends"
    return ends or config.objective.table == "learned" or config.method.name.startswith("noprop")


def trained_parts(config: Config, block: int) -> list[str]:
    """Returns the parts that a step of a block trains, its own first."""
    method = config.method.name
    if method == "local":
        return [part_name(group) for group in range(config.partition.num_blocks)]
    if method == "forward_forward" and block == 1:
        return [READOUT]
    if method.startswith("forward_forward"):
        return [part_name(layer) for layer in range(config.model.depth)]
    return [part_name(block), *([SHARED] if has_shared(config) else [])]


def build_module(config: Config, name: str) -> nn.Module:
    """Returns a part's module on the CPU, initialised from the stream (seed, "init/<part>") whatever else exists."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, f"init/{name}"))
        if config.model.name == "noprop_cnn":
            return _cnn_part(config, name)
        return _label_vit_part(config, name) if config.method.name == "diffusion_blocks" else _plain_part(config, name)


def learned_table(config: Config) -> LearnedTable | None:
    """Returns the table that blocks train together, if there is one."""
    if config.objective.table != "learned":
        return None
    return LearnedTable(config.data.num_classes, config.model.width, config.seed, config.objective.normalize)


def _cnn_part(config: Config, name: str) -> nn.Module:
    model, data, method = config.model, config.data, config.method.name
    if name == SHARED and method == "diffusion_blocks":
        return Shared(None, learned_table(config))
    if name == SHARED:
        return NoPropShared(model.width, data.num_classes, learned_table(config), learned_schedule=method == "noprop_ct")
    return NoPropCNN(
        channels=data.channels,
        size=data.size,
        width=model.width,
        out_features=model.width if method == "noprop_fm" else data.num_classes,
        hidden=model.hidden,
        timed=method != "noprop_dt",
    )


def _label_vit_part(config: Config, name: str) -> nn.Module:
    model, data = config.model, config.data

    def ends() -> LabelEnds:
        return LabelEnds(
            channels=data.channels,
            size=data.size,
            patch_size=model.patch_size,
            width=model.width,
            num_classes=data.num_classes,
            label_token=model.label_token,
            order=model.adaLN,
        )

    if name == SHARED:
        return Shared(ends() if model.share == "ends" else None, learned_table(config))
    condition_width = model.width if model.adaLN == "dit" else model.width // 6
    layers = Layers(
        DiTLayer(
            model.width,
            model.heads,
            model.mlp_ratio,
            condition_width=condition_width,
            order=model.adaLN,
            dropout=model.dropout,
        )
        for _ in range(configuration.layer_split(config)[int(name.removeprefix("block_"))])
    )
    initialize(layers)
    return layers if model.share == "ends" else LabelViT(ends(), layers)


def _plain_part(config: Config, name: str) -> nn.Module:
    model, data, method = config.model, config.data, config.method.name
    if name == READOUT:
        return nn.Sequential(nn.LayerNorm(model.width), nn.Linear(model.width, data.num_classes))
    group = int(name.removeprefix("block_"))
    tokens = None
    if group == 0:
        tokens = Tokens(
            channels=data.channels,
            size=data.size,
            patch_size=model.patch_size,
            width=model.width,
            own_token=method != "forward_forward_plain",
        )
    return ViT(
        tokens=tokens,
        depth=configuration.layer_split(config)[group],
        width=model.width,
        heads=model.heads,
        mlp_ratio=model.mlp_ratio,
        dropout=model.dropout,
        num_classes=0 if method.startswith("forward_forward") else data.num_classes,
    )


def build_objective(config: Config) -> Any:
    """Returns the objective that a configuration describes: training_loss and predict."""
    method, objective = config.method.name, config.objective
    groups = config.partition.num_blocks
    if method in ("end_to_end", "local", "greedy"):
        return baselines.Groups(groups, method == "greedy", config.seed)
    if method == "forward_forward":
        return baselines.ContrastiveForwardForward(groups, config.seed)
    if method == "forward_forward_plain":
        tokens = fixed_table(config.data.num_classes, config.model.width, config.seed, normalize=True)
        return baselines.ForwardForward(groups, tokens * config.model.width**0.5, config.seed)
    fixed = None
    if objective.table == "fixed":
        fixed = fixed_table(config.data.num_classes, config.model.width, config.seed, objective.normalize)
    if method.startswith("noprop"):
        return NoProp(method.removeprefix("noprop_"), objective.networks, objective.eta, fixed, config.seed)
    vit = config.model.name == "vit"
    return LabelDiffusion(
        configuration.levels(config),
        configuration.partition(config),
        config.partition.overlap,
        objective.sigma_data,
        objective.weighting,
        fixed,
        skip=vit and config.model.label_token == "instead",
        shared_ends=vit and config.model.share == "ends",
        seed=config.seed,
    )


@dataclass
class Classifier:
    """A trained classifier.

    Attributes:
        modules: by part name.
        scale: model units per unit of pixels in [-1, 1].
    """

    config: Config
    objective: Any
    modules: Mapping[str, nn.Module]
    scale: float
    autocast: Callable[[], AbstractContextManager] = nullcontext

    @property
    def device(self) -> torch.device:
        return next(next(iter(self.modules.values())).parameters()).device

    def inference(self, steps: int | None = None, first: int = 0) -> Inference:
        """Returns how the settings draw a prediction; `first` is the place of the first image in its split."""
        settings = self.config.eval
        dials = (settings.label_schedule, settings.initial_noise, settings.bridge, settings.top_k)
        return Inference(steps, *dials, self.config.sampler.seed, first)

    @torch.inference_mode()
    def stages(self, x: Tensor, steps: int | None = None, first: int = 0) -> Tensor:
        """Returns logits after each step or group, (stages, N, classes), of images in model units; the last is the prediction."""
        return self.objective.predict(self.modules, x, self.inference(steps, first), self.autocast())

    def predict(self, images: Image.Image | np.ndarray | Tensor, steps: int | None = None) -> Tensor:
        """Returns the probabilities of the classes, (N, classes) on the CPU.

        Args:
            images: one picture of any size, brought to the data's size and channels; or uint8 (N, C, H, W), as the data set
                has them.
            steps: of the sampler; None: one per block.

        Raises:
            SettingError: images of another shape or type.
        """
        data = self.config.data
        if isinstance(images, Image.Image):
            picture = np.asarray(image_sets.crop(images.convert("L" if data.channels == 1 else "RGB"), data.size))
            images = picture.reshape(1, data.size, data.size, data.channels).transpose(0, 3, 1, 2)
        images = torch.as_tensor(np.array(images) if isinstance(images, np.ndarray) else images)
        shape = (data.channels, data.size, data.size)
        require(
            images.dtype == torch.uint8 and images.shape[1:] == shape,
            f"images must be uint8 (N, {', '.join(map(str, shape))}), got {images.dtype} {tuple(images.shape)}",
        )
        x = (images.to(self.device).float() / 127.5 - 1) * self.scale
        return self.stages(x, steps)[-1].softmax(-1).cpu()


def build_model(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware) -> Classifier:
    """Returns a model to use, of parts' modules by name; `scale` is in model units per unit of pixels in [-1, 1]."""
    return Classifier(config, build_objective(config), modules, scale, hardware.autocast)


# ---------------------------------------------------------------------------------------------------------------------
# What the pipeline asks


def check(config: Config) -> None:
    """Refuses what cannot work as far as it can be known without work."""
    data_sets.check_images(**image_settings(config))


def sample_sets(config: Config) -> tuple[()]:
    """Returns the sets of samples that are scored, for several processes to divide: a classifier draws none."""
    return ()


def image_settings(config: Config) -> dict[str, Any]:
    """Returns data.load_images's arguments."""
    settings = dataclasses.asdict(config.data)
    for key in ("channels", "num_classes", "crop", "randaugment"):
        del settings[key]
    return {**settings, "sigma_data": IMAGE_STD}


def load(config: Config) -> ImageData:
    """Loads the data and checks that they are what the model is built for, with more than one class."""
    data = data_sets.load_images(**image_settings(config))
    require(data.channels == config.data.channels, f"data.channels={config.data.channels}: the images have {data.channels}")
    require(
        config.data.num_classes == data.num_classes,
        f"data.num_classes={config.data.num_classes}: the data have {data.num_classes}",
    )
    present = len(np.unique(data.train.labels))
    require(present >= 2, f"data.name={config.data.name}: all training images have one label, so there is nothing to learn")
    return data


def source(config: Config, data: ImageData, device: torch.device) -> Any:
    """Returns what gives each training step its batch: augmented, and for the contrastive loss in two views."""

    def view(number: int) -> BatchSource:
        augment = Augmentation(data.flip, config.data.crop, config.data.randaugment, config.seed, number)
        return BatchSource(dataclasses.replace(data, flip=False), device, seed=config.seed, augment=augment)

    return TwoViews(view(0), view(1)) if config.method.name == "forward_forward" else view(0)


def stand_in(config: Config) -> ImageData:
    """Returns random images for measurements that do not depend on what they show."""
    return data_sets.random_images(config)


def one_evaluation(
    config: Config, block: int, modules: Mapping[str, nn.Module], hardware: Hardware
) -> tuple[Callable[[], Tensor], int]:
    """Returns what runs a block once, for as many images as a training step has, and how often a prediction does."""
    model = build_model(config, modules, 1.0, hardware)
    objective, size = model.objective, config.train.batch_size
    images = torch.randn(size, config.data.channels, config.data.size, config.data.size, device=hardware.device)
    if config.method.name == "end_to_end":
        return lambda: model.stages(images), 1
    z = torch.randn(size, config.model.width, device=hardware.device)
    level = math.sqrt(math.prod(objective.partition.interval(block)))
    sigma = torch.full((size,), level, dtype=torch.float64, device=hardware.device)
    steps = (config.eval.label_steps or [config.partition.num_blocks])[0]
    evaluate = torch.inference_mode()(lambda: objective.logits(modules, block, z, sigma, images, hardware.autocast()))
    return evaluate, steps


def plot_partition(config: Config, path: Path) -> None:
    """Draws the density of the levels, the blocks' intervals and their overlap, for a method that has levels."""
    if config.method.name != "diffusion_blocks":
        return
    objective = build_objective(config)
    intervals = [objective.interval(block) for block in range(objective.partition.num_blocks)]
    plots.plot_partition(objective.distribution, objective.partition.edges, intervals, path)


def measure(config: Config, modules: Mapping[str, nn.Module], data: ImageData, hardware: Hardware) -> dict[str, float]:
    """Returns accuracy and cross-entropy of a model in training on the first test images."""
    count = config.eval.loss_images
    test = Split(data.test.images[:count], data.test.labels[:count])
    model = build_model(config, modules, data.scale, hardware)
    logits = logits_of_test_split(dataclasses.replace(data, test=test), model, None, config.eval.batch_size)[-1]
    return label_scores(logits, torch.from_numpy(np.array(test.labels)))


def evaluate(
    config: Config, data: ImageData, model: Classifier, weights: dict[str, Any], folder: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """Scores a trained model; returns results, each with `kind`, `title`, `scores` and `protocol`."""
    results = [accuracy_result(config, data, model, steps) for steps in config.eval.label_steps or [None]]
    if config.method.name == "diffusion_blocks":
        results.append(denoising_result(config, data, model, folder))
    return [*results, cost_result(config, data, model, folder)]


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def label_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, top-5 accuracy and mean cross-entropy in nats of logits (N, classes) against labels (N,)."""
    ranked = logits.topk(min(TOP, logits.shape[1]), dim=1).indices  # (N, 5)
    hits = ranked == labels[:, None]
    return {
        "accuracy": hits[:, 0].double().mean().item(),
        "top5": hits.any(1).double().mean().item(),
        "cross_entropy": F.cross_entropy(logits.double(), labels).item(),
    }


def logits_of_test_split(data: ImageData, model: Classifier, steps: int | None, batch_size: int) -> Tensor:
    """Returns the logits of every test image after each stage, (stages, N, classes) on the CPU, whatever the batch size."""
    images, found = data.test.images, []
    for start in range(0, len(images), batch_size):
        batch = torch.from_numpy(np.array(images[start : start + batch_size])).to(model.device)
        found.append(model.stages(data.normalize(batch), steps, start).cpu())
    return torch.cat(found, dim=1)


def accuracy_result(config: Config, data: ImageData, model: Classifier, steps: int | None) -> dict[str, Any]:
    """Accuracy and cross-entropy on all test images, after each step or group, and with images shuffled against labels."""
    stages = logits_of_test_split(data, model, steps, config.eval.batch_size)
    labels = torch.from_numpy(np.array(data.test.labels))
    by_stage = [{"stage": number, **label_scores(logits, labels)} for number, logits in enumerate(stages)]
    shuffle = torch.randperm(len(labels), generator=generator(config.eval.seed, "shuffle"))
    scores = {**by_stage[-1], "shuffled_accuracy": label_scores(stages[-1][shuffle], labels)["accuracy"]}
    del scores["stage"]
    protocol = {"metric": "top-1 and top-5 accuracy", "split": "test", "images": len(labels), "seed": config.eval.seed}
    if config.method.name == "diffusion_blocks":
        objective, inference = model.objective, model.inference(steps)
        levels = objective.schedule(inference)
        for row, level in zip(by_stage, levels.tolist(), strict=True):
            row |= {"level": level, "block": objective.partition.block_of(level)}
        scores["cross_entropy_at_sigma_max"] = by_stage[0]["cross_entropy"]
        protocol["sampler"] = {**inference._asdict(), "steps": len(levels), "visits": visits(levels, objective.partition)}
    elif config.method.name.startswith("noprop"):
        default = config.objective.networks if config.method.name == "noprop_dt" else baselines.ODE_STEPS
        protocol["sampler"] = {"steps": steps or default, "seed": config.sampler.seed}
    title = f"test, {steps or 'default'} steps" if "sampler" in protocol else "test"
    return {"kind": "classification", "title": title, "scores": scores, "stages": by_stage, "protocol": protocol}


def embedding_evidence(table: Tensor, z: Tensor, sigma: float) -> Tensor:
    """Returns ln p(z | class) up to a constant, (N, classes) float64: all that a noisy embedding z (N, D) says by itself."""
    table, z = table.double(), z.double()
    return (z @ table.T - table.square().sum(1) / 2) / sigma**2


def label_information(table: Tensor, sigma: float, seed: int) -> float:
    """Returns the nats of the label that a noisy embedding gives away, by Monte Carlo: ln classes - E[cross-entropy].

    The cross-entropy is that of the exact posterior under equally likely classes; no weights are involved.
    """
    labels = torch.arange(INFORMATION_DRAWS) % len(table)
    noise = torch.randn(INFORMATION_DRAWS, table.shape[1], generator=generator(seed, "information"), dtype=torch.float64)
    evidence = embedding_evidence(table.cpu(), table.cpu().double()[labels] + sigma * noise, sigma)
    return math.log(len(table)) - F.cross_entropy(evidence, labels).item()


def mean_cosine(table: Tensor) -> float:
    """Returns the mean cosine between different rows of a table: 1 where it has collapsed."""
    rows = F.normalize(table.double(), dim=1)
    n = len(rows)
    return ((rows.sum(0).square().sum() - n) / (n * (n - 1))).item()


@torch.inference_mode()
def denoising_result(config: Config, data: ImageData, model: Classifier, folder: Path) -> dict[str, Any]:
    """What each block makes of the true label's noisy embedding, on a grid of levels with the same noise for every model.

    Beside it what the embedding gives away by itself, and the same blocks on images shuffled against labels (of which one in
    as many as there are classes keeps its label by chance): a block that does as well on those does not look at its image.
    """
    settings, objective = config.eval, model.objective
    count = min(settings.loss_images, len(data.test.labels))
    images = data.normalize(torch.from_numpy(np.array(data.test.images[:count]))).to(model.device)
    labels = torch.from_numpy(np.array(data.test.labels[:count])).to(model.device)
    others = images[torch.randperm(count, generator=generator(settings.seed, "shuffle")).to(model.device)]
    table = objective.table(model.modules, model.device)
    grid = loss_grid(objective.distribution, settings.loss_levels)
    owners = np.array([objective.partition.block_of(level) for level in grid.levels])
    found: dict[str, list[dict[str, float]]] = {"own": [], "other": [], "embedding": []}
    for index, (level, block) in enumerate(zip(grid.levels.tolist(), owners.tolist(), strict=True)):
        noise = torch.randn((count, table.shape[1]), generator=generator(settings.seed, "heldout", index)).to(model.device)
        z = table[labels] + level * noise
        sigma = torch.full((count,), level, dtype=torch.float64, device=model.device)
        for name, x in (("own", images), ("other", others)):
            parts = [
                objective.logits(model.modules, block, z[rows], sigma[rows], x[rows], model.autocast())
                for rows in torch.arange(count).split(config.eval.batch_size)
            ]
            found[name].append(label_scores(torch.cat(parts), labels))
        found["embedding"].append(label_scores(embedding_evidence(table, z, level), labels))

    def mean(name: str, score: str, own: np.ndarray) -> float:
        values = np.array([row[score] for row in found[name]])
        return float((grid.mass * values)[own].sum() / grid.mass[own].sum())

    information = [label_information(table, edge, settings.seed) for edge in objective.partition.edges]
    blocks = []
    for block in range(objective.partition.num_blocks):
        own = owners == block
        row: dict[str, Any] = {"block": block, "nats": information[block + 1] - information[block], "levels": int(own.sum())}
        if own.any():
            row |= {
                "accuracy": mean("own", "accuracy", own),
                "cross_entropy": mean("own", "cross_entropy", own),
                "accuracy_of_embedding_alone": mean("embedding", "accuracy", own),
                "cross_entropy_of_embedding_alone": mean("embedding", "cross_entropy", own),
                "accuracy_on_other_images": mean("other", "accuracy", own),
                "cross_entropy_on_other_images": mean("other", "cross_entropy", own),
            }
            row["ignores_image"] = row["cross_entropy_on_other_images"] - row["cross_entropy"] < IGNORED
        blocks.append(row)
    notes = [f"block {row['block']} ignores the image" for row in blocks if row.get("ignores_image")]
    for note in notes:
        print(f"note: {note}: what it predicts can be read off the noisy embedding")
    curve = [row["cross_entropy"] for row in found["own"]]
    (folder / "plots").mkdir(exist_ok=True)
    plots.plot_loss_by_level(
        {"block": (grid.levels, curve), "embedding alone": (grid.levels, [row["cross_entropy"] for row in found["embedding"]])},
        objective.partition.edges,
        folder / "plots" / "loss_by_level.png",
    )
    edges = np.geomspace(objective.distribution.minimum, objective.distribution.maximum, settings.loss_levels + 1)
    return {
        "kind": "label_denoising",
        "title": "true label, noised",
        "scores": {
            "cross_entropy": float((grid.mass * np.array(curve)).sum()),
            "table_cosine": mean_cosine(table),
        },
        "blocks": blocks,
        "notes": notes,
        "by_level": {
            "levels": grid.levels.tolist(),
            "edges": edges.tolist(),
            "mass": grid.mass.tolist(),
            "cross_entropy": curve,
            "cross_entropy_of_embedding_alone": [row["cross_entropy"] for row in found["embedding"]],
            "cross_entropy_on_other_images": [row["cross_entropy"] for row in found["other"]],
        },
        "protocol": {
            "metric": "cross-entropy in nats from the true label's noisy embedding, unweighted",
            "split": "test",
            "images": count,
            "levels": settings.loss_levels,
            "seed": settings.seed,
        },
    }


def cost_result(config: Config, data: ImageData, model: Classifier, folder: Path) -> dict[str, Any]:
    """What training costs: bytes that a step holds, the largest over the blocks, and seconds, as the run's metrics have them.

    `state_bytes`: parameters, gradients, AdamW's moments and EMA, in float32, of the parts that the step trains.
    `activation_bytes`: what autograd keeps for the backward pass of one batch, counted once per storage, without the parameters.
    """
    batches, size = source(config, data, model.device), config.train.batch_size
    trained = [trained_parts(config, block) for block in range(configuration.trained_blocks(config))]
    state, activations = step_memory(model.objective, model.modules, trained, batches, size, model.autocast)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = {row["block"]: row for row in rows}
    seconds = sum(row["seconds"] for row in last.values())
    return {
        "kind": "training_cost",
        "title": "training",
        "scores": {
            "state_bytes": max(state),
            "activation_bytes": max(activations),
            "seconds": seconds,
            "seconds_per_step": seconds / sum(row["step"] for row in last.values()),
        },
        "protocol": {"metric": "memory that a step holds, time of all steps", "batch_size": size},
    }
