"""Two questions about blocks and pretrained models, at the scale of digits; the rows go to experiments/results/.

    python -m experiments.conversion warm_start      how blocks should begin, given an end-to-end model
    python -m experiments.conversion adapt           which blocks new data need

A slice of a trained model's layers is not a denoiser, so it is not clear that a block should begin from one. `warm_start`
compares beginnings and, for each, a target that is mixed with a teacher's: (1 - lambda) x + lambda D_teacher(z; sigma), from a
fixed number of draws that were made once, or from new ones in every step. `adapt` trains blocks on digits 0 to 4 and goes on with
5 to 9 in some of them.
"""

import argparse
import csv
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import config as configuration
import evaluation
import generation
import hardware as machine
from checkpoint import Part
from config import Config, DataConfig, MethodConfig, ModelConfig, ObjectiveConfig, PartitionConfig, TrainConfig
from convert import starting_weights
from data import BatchSource, ImageData
from hardware import Hardware
from model import Batch, Draw, EDMObjective, build_module, build_objective, part_name
from train import build_part, train_step

RESULTS = Path(__file__).resolve().parent / "results"
LEVELS = 32  # of the held-out loss
NUM_BLOCKS = 3


def make_config(seed: int, steps: int, method: str = "diffusion_blocks") -> Config:
    """Returns the demo's model and data with `steps` steps per block, float32, no decay of what is averaged."""
    return configuration.resolve(
        Config(
            data=DataConfig("digits", size=8, channels=1, num_classes=10),
            model=ModelConfig("dit", "digits", patch_size=2),
            objective=ObjectiveConfig(),
            method=MethodConfig(method),
            partition=PartitionConfig("equi_probability", num_blocks=NUM_BLOCKS),
            train=TrainConfig(steps=steps, precision="fp32"),
            seed=seed,
        )
    )


@dataclass(frozen=True)
class DistilledObjective(EDMObjective):
    """EDM's objective with the target (1 - share) x + share D_teacher(z; sigma).

    Attributes:
        teacher: one denoiser for all levels.
        share: lambda.
        draws: how many draws there are of each block, made in its first steps and then met again in turn; 0: no end of them.
        cache: by block, what was drawn: clean, noisy and teacher's samples, levels and labels, a row per draw.
    """

    teacher: nn.Module
    share: float
    draws: int
    cache: dict[int, list[tuple[Tensor, ...]]]

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Any) -> Tensor:
        """Returns the loss per sample; see model.Objective. The teacher runs only while draws are being made."""
        made = self.cache.setdefault(draw.block, [])
        rounds = self.draws // draw.batch_size
        if self.draws == 0 or len(made) < rounds:
            x, labels = batch
            z, sigma = self.add_noise(x, draw)
            condition = self.drop_labels(labels, draw)
            with torch.no_grad():
                denoised = self.denoise(self.teacher, z, sigma, condition)
            drawn = (x, z, denoised, sigma, condition)
            if self.draws:
                made.append(drawn)
        else:
            drawn = made[draw.step % rounds]
        x, z, denoised, sigma, condition = drawn
        return self.loss(modules[part_name(draw.block)], torch.lerp(x, denoised, self.share), z, sigma, condition, autocast)


def train_blocks(
    config: Config,
    objective: EDMObjective,
    source: BatchSource,
    blocks: Sequence[int],
    hardware: Hardware,
    starts: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Part]:
    """Trains some blocks to their last step, from given weights or from the seed's."""
    parts = {part_name(block): build_part(config, part_name(block), hardware.device) for block in blocks}
    for name, weights in (starts or {}).items():
        if name in parts:
            parts[name].module.load_state_dict(weights)
            for key, value in parts[name].module.named_parameters():
                parts[name].ema[key].copy_(value.detach())
    modules = {name: part.module for name, part in parts.items()}
    steps = configuration.total_steps(config) // configuration.trained_blocks(config)
    for block in blocks:
        for _ in range(steps):
            train_step(config.train, objective, source, modules, [parts[part_name(block)]], block, steps, hardware)
    return parts


def weights_of(part: Part) -> dict[str, Tensor]:
    """Returns a part's averaged weights."""
    return {name: value.clone() for name, value in part.ema.items()}


def heldout(config: Config, parts: Mapping[str, Mapping[str, Tensor]], data: ImageData) -> list[float]:
    """Returns the held-out loss of averaged weights: under the training distribution, then of each block's levels."""
    objective = build_objective(config)
    modules = {name: build_module(config, name).eval() for name in parts}
    for name, module in modules.items():
        module.load_state_dict(parts[name], strict=False)  # buffers are not averaged
    grid = evaluation.loss_grid(objective.distribution, LEVELS)
    x = data.normalize(torch.from_numpy(data.test.images.copy()))
    labels = torch.from_numpy(data.test.labels.copy())

    def denoise(z: Tensor, sigma: float, y: Tensor | None) -> Tensor:
        block = objective.partition.block_of(sigma)
        return objective.denoise(modules[part_name(block)], z, torch.full((len(z),), sigma, dtype=torch.float64), y)

    loss = evaluation.heldout_loss(denoise, x, labels, grid, sigma_data=objective.sigma_data, batch_size=len(x), seed=0)
    cut = build_objective(make_config(0, 1)).partition
    summary = evaluation.summarize_loss(loss, grid, [cut.block_of(level) for level in grid.levels])
    return [summary["integrated"], *(block["loss"] for block in summary["blocks"])]


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows of a record."""
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / name, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def row(columns: Mapping[str, Any], losses: Sequence[float], started: float) -> dict[str, Any]:
    """Returns a row of a record."""
    environment = machine.environment()
    return {
        **columns,
        "heldout_loss": f"{losses[0]:.4f}",
        **{f"block_{block}_levels": f"{loss:.4f}" for block, loss in enumerate(losses[1:])},
        "seconds": round(time.perf_counter() - started, 1),
        "images": "test split",
        "weights": "ema",
        "command": " ".join(["python -m experiments.conversion", *sys.argv[1:]]),
        "commit": environment["commit"],
        "torch": environment["torch"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# How blocks should begin


def warm_start(seeds: Sequence[int], steps: int, share: float) -> None:
    """Compares beginnings at `steps` steps per block, and from scratch also at twice that: what the teacher costs.

    A step of the teacher has the layers of all blocks, so `steps` of them cost as much as `steps` steps of every block. The
    shallow denoiser has a block's layers and gets num_blocks times as many.
    """
    hardware = machine.set_up("cpu", "fp32", 1)
    rows = []
    for seed in seeds:
        config, longer = make_config(seed, steps), make_config(seed, 2 * steps)
        data = generation.load(config)
        source = BatchSource(data, hardware.device, seed=seed)
        whole = make_config(seed, steps, "end_to_end")
        teacher = weights_of(train_blocks(whole, build_objective(whole), source, [0], hardware)["block_0"])
        small = make_config(seed, steps, "shallow")
        shallow = weights_of(train_blocks(small, build_objective(small), source, [0], hardware)["block_0"])
        denoiser = build_module(whole, "block_0").eval().requires_grad_(False)
        denoiser.load_state_dict(teacher, strict=False)

        references = (("teacher", whole, {"block_0": teacher}), ("shallow", small, {"block_0": shallow}))
        for name, settings, parts in references:
            columns = {"seed": seed, "start": name, "draws": "none", "steps": steps, "lambda": 0.0}
            rows.append(row(columns, heldout(settings, parts, data), time.perf_counter()))
        for start, draws in [
            (s, d) for s in ("scratch", "slice", "every", "clone") for d in ("none", "1000", "10000", "unlimited")
        ]:
            for settings in (config, longer) if (start, draws) == ("scratch", "none") else (config,):
                started = time.perf_counter()
                objective = build_objective(settings)
                if draws != "none":
                    fields = {item.name: getattr(objective, item.name) for item in dataclasses.fields(objective)}
                    count = 0 if draws == "unlimited" else int(draws)
                    objective = DistilledObjective(**fields, teacher=denoiser, share=share, draws=count, cache={})
                starts = None
                if start != "scratch":
                    weights = starting_weights(
                        shallow if start == "clone" else teacher, start, configuration.layer_split(settings)
                    )
                    starts = {part_name(block): start_of for block, start_of in enumerate(weights)}
                trained = train_blocks(settings, objective, source, range(NUM_BLOCKS), hardware, starts)
                losses = heldout(settings, {name: weights_of(part) for name, part in trained.items()}, data)
                columns = {"seed": seed, "start": start, "draws": draws, "steps": settings.train.steps}
                columns["lambda"] = 0.0 if draws == "none" else share
                rows.append(row(columns, losses, started))
                tqdm.write(str({**columns, "loss": rows[-1]["heldout_loss"], "seconds": rows[-1]["seconds"]}))
                write("warm_start.csv", rows)


# ---------------------------------------------------------------------------------------------------------------------
# Which blocks new data need


def only_labels(data: ImageData, labels: Sequence[int]) -> ImageData:
    """Returns the images of some labels, in the same units."""
    splits = {}
    for name in ("train", "test"):
        split = getattr(data, name)
        kept = np.isin(split.labels, labels)
        splits[name] = dataclasses.replace(split, images=split.images[kept], labels=split.labels[kept])
    return dataclasses.replace(data, **splits)


def adapt(seeds: Sequence[int], steps: int, further: int) -> None:
    """Trains blocks on digits 0 to 4, then `further` steps on 5 to 9 in some blocks; the loss is that of held-out 5 to 9."""
    hardware = machine.set_up("cpu", "fp32", 1)
    rows = []
    for seed in seeds:
        config, more = make_config(seed, steps), make_config(seed, further)
        data = generation.load(config)
        old, new = only_labels(data, range(5)), only_labels(data, range(5, 10))
        objective = build_objective(config)
        trained = train_blocks(config, objective, BatchSource(old, hardware.device, seed=seed), range(NUM_BLOCKS), hardware)
        before = {name: weights_of(part) for name, part in trained.items()}
        every = train_blocks(more, objective, BatchSource(new, hardware.device, seed=seed), range(NUM_BLOCKS), hardware, before)
        scratch = train_blocks(more, objective, BatchSource(new, hardware.device, seed=seed), range(NUM_BLOCKS), hardware)
        after, fresh = ({name: weights_of(part) for name, part in parts.items()} for parts in (every, scratch))
        # Blocks are independent, so adapting some of them is taking those from the job that adapted all.
        for adapted in ([], [0], [0, 1], [0, 1, 2], [2]):
            chosen = {name: after[name] if int(name[-1]) in adapted else before[name] for name in before}
            columns = {"seed": seed, "start": "digits 0 to 4", "adapted": " ".join(map(str, adapted)) or "none"}
            columns |= {"steps": steps, "further_steps": further}
            rows.append(row(columns, heldout(config, chosen, new), time.perf_counter()))
        columns = {"seed": seed, "start": "scratch", "adapted": "0 1 2", "steps": 0, "further_steps": further}
        rows.append(row(columns, heldout(config, fresh, new), time.perf_counter()))
        write("adapt.csv", rows)
    for one in rows:
        print(
            one["seed"],
            one["start"],
            one["adapted"],
            one["heldout_loss"],
            one["block_0_levels"],
            one["block_1_levels"],
            one["block_2_levels"],
        )


def main() -> None:
    """Runs one study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("warm_start", "adapt"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="per block")
    parser.add_argument("--further", type=int, default=200, help="per block, on the new digits")
    parser.add_argument("--share", type=float, default=0.5, help="lambda: the teacher's part of the target")
    arguments = parser.parse_args()
    if arguments.study == "warm_start":
        warm_start(range(arguments.seeds), arguments.steps, arguments.share)
    else:
        adapt(range(arguments.seeds), arguments.steps, arguments.further)


if __name__ == "__main__":
    main()
