"""Two questions about blocks and pretrained models.

    python -m experiments.conversion warm_start --seeds 0 1 scale=digits threads=1 train.steps=300
    python -m experiments.conversion adapt --seeds 0 1 2 scale=digits threads=1 train.steps=300

WARM_START and ADAPT say what is asked. On one free CPU core the lines above take 6 minutes a seed and less than one. They go on
where they stopped, row by row; experiments.report draws the tables from records/studies/.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

import config as configuration
import evaluation
import generation
import hardware as machine
import main as entry_point
from checkpoint import Part
from config import Config, SettingError
from convert import starting_weights
from data import ImageData, Source
from experiments.collect import RECORDS, read_records, replace_rows, setting_of, short_commit, write_rows
from experiments.edges import check_typed, numbers
from hardware import Hardware
from model import Batch, Draw, EDMObjective, build_model, build_module, build_objective, part_name
from train import build_part, train_step

WARM_START = """A slice of a trained model's layers is no denoiser, so it is open how blocks should begin when an end-to-end model
is there. Here it is the `teacher`, trained for S steps. Blocks of S steps each begin from `scratch`; each from its own `slice` of
the teacher's layers; from `every` B-th layer; or as clones of one `shallow` denoiser of a block's depth, trained over all levels
for B x S steps. Each of these has the layer work of the teacher. So with the teacher's cost counted the blocks are up against
those from scratch at 2 S steps, and with a teacher that is there anyway against those at S. The control of the clones is the
shallow denoiser itself, trained twice as long. Draws: the target is
(1 - lambda) x + lambda D_teacher(z; sigma), lambda = .5, from so many draws per block that were made once, or from new ones in
every step; `none` is the data alone. All cells of a seed meet the same data and noise."""

ADAPT = """Blocks are trained on the classes 0 to 4 for S steps each, then for S / 4 steps on the classes 5 to 9 in some of them,
block 0 being the noisiest; the loss is that of held-out images of 5 to 9, under the training distribution and over each block's
levels. Blocks do not interact, so a block that is not adapted keeps its loss. The new classes' embeddings are untrained at
first."""

# No picture is drawn, and the loss is measured at fewer levels than a run of record has.
USUAL = ("eval.features=null", "train.sample_every=0", "eval.loss_levels=32")
SHARE = 0.5  # lambda
STARTS = ("scratch", "slice", "every", "clone")
DRAWS = ("none", "1000", "10000", "unlimited")
# Start, draws and steps as a multiple of S. The number of draws is varied from scratch alone, to keep the study short.
CELLS = [*((start, "none", 1) for start in STARTS), ("scratch", "none", 2)]
CELLS += [*((start, "10000", 1) for start in STARTS), ("scratch", "1000", 1), ("scratch", "unlimited", 1)]
REFERENCES = {"teacher": "end_to_end", "shallow": "shallow"}
TRANSFERS = 0.1  # of the gain: a block that has no more by itself need not be adapted
ADAPTED = ((), (0,), (0, 1), (0, 1, 2), (2,))

KEYS = {
    "warm_start": ("scale", "settings", "seed", "start", "draws", "times"),
    "adapt": ("scale", "settings", "seed", "start", "adapted"),
}
SCORES = ("heldout_loss", "by_block", "by_level", "cpu_seconds", "precision", "commit")
Row = dict[str, Any]
Weights = dict[str, dict[str, Tensor]]  # by part and by name


def make_config(overrides: Sequence[str], seed: int, method: str = "diffusion_blocks", times: float = 1) -> Config:
    """Returns the configuration of one training.

    Args:
        times: its steps, as a multiple of those of the overrides.
    """
    check_typed(overrides, ("method", "seed"))
    assert entry_point.store.list("data")  # importing main registers the schema
    with initialize_config_dir(str(Path(entry_point.__file__).resolve().parent / "configs"), version_base="1.3"):
        composed = compose("config", [*USUAL, f"method={method}", f"seed={seed}", *overrides])
    OmegaConf.resolve(composed)
    config = OmegaConf.to_object(composed)
    config.train.steps = max(int(times * config.train.steps), 1)
    return configuration.resolve(config)


@dataclass(frozen=True)
class DistilledObjective(EDMObjective):
    """EDM's objective with the target (1 - share) x + share D_teacher(z; sigma).

    Attributes:
        teacher: one denoiser for all levels.
        share: lambda.
        draws: how many draws there are of each block, in whole batches, made in its first steps and then met again in turn; 0: no
            end of them.
        cache: by block and place, a batch that was drawn: clean, noisy and teacher's samples, levels and labels.
    """

    teacher: nn.Module
    share: float
    draws: int
    cache: dict[tuple[int, int], tuple[Tensor | None, ...]]

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Any) -> Tensor:
        """Returns the loss per sample; see model.Objective. The teacher runs only while draws are being made."""
        place = (draw.block, draw.step % max(self.draws // draw.batch_size, 1))
        drawn = self.cache.get(place) if self.draws else None
        if drawn is None:
            x, labels = batch
            z, sigma = self.add_noise(x, draw)
            condition = self.drop_labels(labels, draw)
            with torch.no_grad():
                drawn = (x, z, self.denoise(self.teacher, z, sigma, condition), sigma, condition)
            if self.draws:
                self.cache[place] = drawn
        x, z, denoised, sigma, condition = drawn
        return self.loss(modules[part_name(draw.block)], torch.lerp(x, denoised, self.share), z, sigma, condition, autocast)


def train_blocks(
    config: Config, objective: EDMObjective, source: Source, hardware: Hardware, starts: Sequence[dict[str, Tensor]] | None = None
) -> Weights:
    """Trains all blocks to their last step, from given weights or from the seed's, and returns their averaged weights."""
    blocks = configuration.trained_blocks(config)
    steps = configuration.total_steps(config) // blocks
    averaged = {}
    for block in range(blocks):
        part: Part = build_part(config, part_name(block), hardware.device)
        if starts is not None:
            part.module.load_state_dict(starts[block], strict=False)  # buffers are not averaged
            part.ema.update({name: value.detach().clone() for name, value in part.module.named_parameters()})
        modules = {part_name(block): part.module}
        for _ in range(steps):
            train_step(config.train, objective, source, modules, [part], block, steps, hardware)
        averaged[part_name(block)] = part.ema
    return averaged


def load_modules(config: Config, weights: Weights) -> dict[str, nn.Module]:
    """Returns a model's parts with averaged weights, to be used alone."""
    modules = {name: build_module(config, name).eval().requires_grad_(False) for name in weights}
    for name, module in modules.items():
        module.load_state_dict(weights[name], strict=False)
    return modules


class Study:
    """The rows of one study, and what its trainings have in common; `commit` of the code and precision come with every row."""

    def __init__(self, name: str, overrides: list[str], path: Path) -> None:
        self.key, self.path, self.overrides = KEYS[name], path, overrides
        self.rows: list[Row] = list(read_records(path, (*self.key, *SCORES)))
        config = make_config(overrides, 0)
        scale = next((item.partition("=")[2] for item in overrides if item.startswith("scale=")), "digits")
        self.common = {"scale": scale, "settings": setting_of(overrides)}
        self.hardware = machine.set_up(config.device, config.train.precision, config.threads)
        self.partition = build_objective(config).partition

    def add(self, columns: Row, score: Callable[[], tuple[Config, Weights, ImageData]]) -> None:
        """Adds a row with what `score` trains, unless the row is there."""
        columns = {**self.common, **columns}
        if any(all(row[key] == str(columns[key]) for key in self.key) for row in self.rows):
            return
        started = time.process_time()
        config, weights, data = score()
        model = build_model(config, load_modules(config, weights), data.scale, self.hardware)
        grid, loss, _ = generation.heldout_loss(config, data, model)
        summary = evaluation.summarize_loss(loss, grid, [self.partition.block_of(level) for level in grid.levels])
        row = {
            **columns,
            "heldout_loss": f"{summary['integrated']:.6g}",
            "by_block": numbers(block["loss"] for block in summary["blocks"]),
            "by_level": numbers(loss),
            "cpu_seconds": round(time.process_time() - started, 1),
            "precision": self.hardware.precision,
            "commit": short_commit(machine.environment()["commit"]),
        }
        replace_rows(self.rows, [{key: str(value) for key, value in row.items()}], self.key)
        write_rows(self.path, self.rows, (*self.key, *SCORES))
        print({**columns, "heldout_loss": row["heldout_loss"], "cpu_seconds": row["cpu_seconds"]}, flush=True)


def warm_start(overrides: list[str], seed: int, path: Path, draws: Sequence[str] = DRAWS) -> None:
    """Compares one seed's beginnings of blocks; see WARM_START.

    Args:
        draws: cells with other numbers of draws are left out.
    """
    study = Study("warm_start", overrides, path)
    data = generation.load(make_config(overrides, seed))
    caches: dict[str, dict] = defaultdict(dict)  # by number of draws: all starts meet the same ones

    @functools.cache
    def reference(name: str) -> Weights:
        return train(make_config(overrides, seed, REFERENCES[name]), "scratch", "none")

    def train(config: Config, start: str, draws: str) -> Weights:
        objective, starts = build_objective(config), None
        if start != "scratch":
            weights = reference("shallow" if start == "clone" else "teacher")[part_name(0)]
            starts = starting_weights(weights, start, configuration.layer_split(config))
        if draws != "none":
            teacher = load_modules(make_config(overrides, seed, "end_to_end"), reference("teacher"))[part_name(0)]
            count = 0 if draws == "unlimited" else int(draws)
            fields = {item.name: getattr(objective, item.name) for item in dataclasses.fields(objective)}
            objective = DistilledObjective(**fields, teacher=teacher, share=SHARE, draws=count, cache=caches[draws])
        source = generation.source(config, data, study.hardware.device)
        return train_blocks(config, objective, source, study.hardware, starts)

    def add_reference(name: str, times: int) -> None:
        config = make_config(overrides, seed, REFERENCES[name], times)
        columns = {"seed": seed, "start": name, "draws": "none", "times": times}
        study.add(columns, lambda: (config, reference(name) if times == 1 else train(config, "scratch", "none"), data))

    for name in REFERENCES:
        add_reference(name, 1)
    for start, number, times in (cell for cell in CELLS if cell[1] in draws):
        config = make_config(overrides, seed, times=times)
        columns = {"seed": seed, "start": start, "draws": number, "times": times}
        study.add(columns, lambda config=config, start=start, number=number: (config, train(config, start, number), data))
    add_reference("shallow", 2)


def only_labels(data: ImageData, labels: Sequence[int]) -> ImageData:
    """Returns the images of some labels, in the same units."""
    splits = {}
    for name in ("train", "test"):
        split = getattr(data, name)
        kept = np.isin(split.labels, labels)
        splits[name] = dataclasses.replace(split, images=split.images[kept], labels=split.labels[kept])
    return dataclasses.replace(data, **splits)


def adapt(overrides: list[str], seed: int, path: Path) -> None:
    """Adapts one seed's blocks to new classes; see ADAPT."""
    study = Study("adapt", overrides, path)
    config, further = make_config(overrides, seed), make_config(overrides, seed, times=1 / 4)
    data = generation.load(config)
    old, new = only_labels(data, range(5)), only_labels(data, range(5, 10))

    def train(config: Config, data: ImageData, starts: Sequence[dict[str, Tensor]] | None = None) -> Weights:
        source = generation.source(config, data, study.hardware.device)
        return train_blocks(config, build_objective(config), source, study.hardware, starts)

    before = functools.cache(lambda: train(config, old))
    after = functools.cache(lambda: train(further, new, list(before().values())))

    def mixed(adapted: Sequence[int]) -> Weights:
        """Adapting some blocks is taking those from the job that adapted all."""
        taken = [part_name(block) for block in adapted]
        return {name: after()[name] if name in taken else weights for name, weights in before().items()}

    for adapted in ADAPTED:
        columns = {"seed": seed, "start": "classes 0 to 4", "adapted": " ".join(map(str, adapted)) or "none"}
        study.add(columns, lambda adapted=adapted: (config, mixed(adapted), new))
    study.add({"seed": seed, "start": "scratch", "adapted": "0 1 2"}, lambda: (further, train(further, new), new))


# ---------------------------------------------------------------------------------------------------------------------
# From rows to verdicts


def section(rows: Mapping[str, list[Row]]) -> list[str]:
    """Returns the report's part, from the rows of each study."""
    lines = []
    for study, title, about, names in (
        ("warm_start", "How should blocks begin from a pretrained model?", WARM_START, ("start", "draws", "times")),
        ("adapt", "Which blocks do new data need?", ADAPT, ("start", "adapted")),
    ):
        own = rows.get(study, [])
        lines += [f"## {title}\n", f"{about}\n"] if own else []
        for scale, settings in sorted({(row["scale"], row["settings"]) for row in own}):
            group = [row for row in own if (row["scale"], row["settings"]) == (scale, settings)]
            cells: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
            for row in group:
                cells[tuple(row[name] for name in names)][row["seed"]] = row
            lines.append(f"### {scale}, `{settings}`\n" if settings else f"### {scale}\n")
            lines += warm_start_tables(cells) if study == "warm_start" else adapt_tables(cells)
    return lines


def losses(cell: Mapping[str, Row], block: int | None = None) -> dict[str, float]:
    """Returns a cell's held-out loss by seed, over all levels or a block's."""
    return {seed: float(row["heldout_loss"] if block is None else row["by_block"].split()[block]) for seed, row in cell.items()}


def compared(ours: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, str]:
    """Returns the mean difference of the seeds that two cells share, and a word: `better` or `worse` if every seed says so."""
    found = [ours[seed] - other[seed] for seed in sorted(ours.keys() & other.keys())]
    if not found:
        return "", "open"
    word = "better" if max(found) < 0 else "worse" if min(found) > 0 else "level"
    return f"{statistics.mean(found):+.4f}", word


def phrase(word: str, seeds: int) -> str:
    """Returns the word of a comparison with what it rests on."""
    every = "in every seed" if seeds > 1 else "in the one seed"
    return {"better": f"better {every}", "worse": f"worse {every}", "level": "not told apart", "open": "not run"}[word]


def row_of(names: Sequence[str], cell: Mapping[str, Row], *more: str) -> str:
    """Returns a line of a table: names, seeds, loss, loss by block, and more."""
    blocks = range(len(next(iter(cell.values()))["by_block"].split()))
    means = [statistics.mean(losses(cell, block).values()) for block in (None, *blocks)]
    return "| " + " | ".join([*names, str(len(cell)), *(f"{mean:.4f}" for mean in means), *more]) + " |"


def head(cell: Mapping[str, Row], *names: str, more: Sequence[str]) -> list[str]:
    """Returns the head of a table of such lines."""
    blocks = [f"block {block}'s levels" for block in range(len(next(iter(cell.values()))["by_block"].split()))]
    columns = [*names, "seeds", "held-out loss", *blocks, *more]
    return ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]


def warm_start_tables(cells: Mapping[tuple[str, ...], Mapping[str, Row]]) -> list[str]:
    """Returns the table of beginnings and the verdict."""
    free, counted = (losses(cells.get(("scratch", "none", times), {})) for times in ("1", "2"))
    lines = head(next(iter(cells.values())), "start", "draws", "steps", more=("to scratch, S", "to scratch, 2 S"))
    words: dict[str, list[str]] = defaultdict(list)
    for (start, draws, times), cell in cells.items():
        ours = losses(cell)
        differences = [compared(ours, other) for other in (free, counted)]
        lines.append(row_of((start, draws, "2 S" if times == "2" else "S"), cell, *(text for text, _ in differences)))
        if times == "1" and start in STARTS and (start, draws) != ("scratch", "none"):
            for question, (_, word) in zip(("free", "counted"), differences, strict=True):
                words[question, word].append(f"{start}/{draws}")
    told = {
        "free": "With the teacher free, against scratch at S",
        "counted": "With the teacher's cost counted, against scratch at 2 S",
    }
    verdict = []
    for (question, text), other in zip(told.items(), (free, counted), strict=True):
        found = {word: words[question, word] for word in ("better", "level", "worse", "open") if words[question, word]}
        if found:
            parts = [f"{phrase(word, len(other))}: {', '.join(names)}" for word, names in found.items()]
            verdict.append(f"{text}: {'; '.join(parts)}")
    longer = losses(cells.get(("shallow", "none", "2"), {}))
    difference, word = compared(losses(cells.get(("clone", "none", "1"), {})), longer)
    if longer:
        verdict.append(f"Clones against the shallow denoiser trained twice as long: {phrase(word, len(longer))}, {difference}")
    return ["\n".join(lines) + "\n", *(["Verdict. " + ". ".join(verdict) + ".\n"] if verdict else [])]


def adapt_tables(cells: Mapping[tuple[str, ...], Mapping[str, Row]]) -> list[str]:
    """Returns the table of what was adapted and the verdict: how much of the whole gain some blocks have."""
    lines = head(next(iter(cells.values())), "start", "adapted", more=("share of the gain of all",))
    none, every = (losses(cells.get(("classes 0 to 4", adapted), {})) for adapted in ("none", "0 1 2"))
    seeds = sorted(none.keys() & every.keys())
    shares: dict[str, float] = {}
    for (start, adapted), cell in cells.items():
        ours = losses(cell)
        if start != "scratch" and seeds and ours.keys() >= set(seeds):
            shares[adapted] = statistics.mean((none[seed] - ours[seed]) / (none[seed] - every[seed]) for seed in seeds)
        share = f"{shares[adapted]:.0%}" if start != "scratch" and adapted in shares else ""
        lines.append(row_of((start, adapted), cell, share))
    text = ["\n".join(lines) + "\n"]
    if shares:
        parts = ", ".join(f"{adapted}: {share:.0%}" for adapted, share in shares.items() if adapted not in ("none", "0 1 2"))
        own = shares.get("2", 1)
        transfer = "transfers: no more than" if round(own, 2) <= TRANSFERS else "does not transfer: more than"
        text.append(
            f"Verdict. Of the gain of adapting all blocks, some have: {parts}. The cleanest block {transfer} {TRANSFERS:.0%} of "
            "the gain is its own.\n"
        )
    return text


def main() -> None:
    """Runs one study; experiments.report draws the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=tuple(KEYS))
    parser.add_argument("overrides", nargs="*", help="of the runs, such as scale=digits threads=1 train.steps=250")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=DRAWS, help="of warm_start's cells (default: all)")
    parser.add_argument("--records", type=Path, help="default: records/studies/STUDY.csv")
    arguments = parser.parse_intermixed_args()
    path = arguments.records or RECORDS / "studies" / f"{arguments.study}.csv"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for seed in arguments.seeds:
            if arguments.study == "warm_start":
                warm_start(arguments.overrides, seed, path, arguments.draws)
            else:
                adapt(arguments.overrides, seed, path)
    except (SettingError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: the rows in {path} cannot be written ({error}): set --records")


if __name__ == "__main__":
    main()
