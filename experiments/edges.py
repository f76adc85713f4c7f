"""Where should the edges be? An oracle by dynamic programming, and what cheap candidates lose against it.

    python -m experiments.edges --seeds 0 1 2 out=runs threads=1 log.progress=false train.steps=1000

At digits, the usual scale, about 45 minutes a seed on one CPU core; it goes on where it stopped. ABOUT says what is done;
experiments.report draws the tables from records/edges.csv, which holds one study a scale.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import checkpoint
import config as configuration
import generation
import main as entry_point
import pipeline
from checkpoint import WriteError
from config import Config, SettingError, digest, require
from dblock_modules import LogNormalLevels
from evaluation import loss_grid
from experiments.collect import (
    RECORDS,
    command_of,
    flatten,
    hardware_of,
    is_under,
    read_records,
    replace_rows,
    short_commit,
    train_seconds,
    write_rows,
)
from randomness import generator
from train import NonFiniteLoss, read_metrics

ABOUT = """Blocks do not interact, so the held-out loss of a partition is a sum over its intervals, J = sum_b of the integral over
I_b of q(sigma) l_b(sigma). One expert is trained for every interval between two levels of a grid: a network of a block's depth
whose training distribution is cut to the interval, without overlap. Dynamic programming over their losses, averaged over seeds,
gives the best edges for every number of blocks, and the loss of any other partition of the grid. Candidates are snapped to the
grid; what their pilots cost in layer work is taken from their experts' steps (a tenth for each pilot, at three blocks). An expert
makes the same steps whatever the number of blocks, so partitions into more blocks have more work in them: J compares partitions
into one number of blocks, not the numbers.

Two weightings q define "best", fixed beforehand: the training distribution (`p_noise`) and all levels alike in log sigma
(`log_uniform`). Candidates: equal probability (the paper's); equal in log sigma; equal loss of a shallow pilot; equal reducible
loss, q (l_shallow - l_deep) of two pilots; equal arc of the dynamics, p_noise sqrt(E||dD/d ln sigma||) of one pilot. Related work
chooses intervals by other means: multi-stage diffusion (arXiv 2312.09181), DiffPruning (2409.15557), Blockwise Flow Matching
(2510.21167)."""

# The edges of equal probability for 2, 3 and 4 blocks and of log-uniform for 3 are on the grid.
GRID = (0.002, 0.03, 0.068399, 0.134076, 0.179632, 0.3012, 0.505041, 0.676649, 1.2, 2.33921, 80.0)
DEPTH, DEEP = 4, 12  # layers of an expert, and of the deep pilot
TENTHS = 10  # of an expert's steps, after each of which its loss is recorded
WEIGHTINGS = ("p_noise", "log_uniform")

# An expert's depth for the steps of one of three blocks, so that a partition into three costs what end to end does.
EXPERT = ("method=end_to_end", "eval.features=null", "train.label_dropout=0.1", "train.sample_every=0")

# What tells the experts of a study apart, and is not typed.
VARIED = ("method", "seed", "model.depth", "objective.sigma_min", "objective.sigma_max")

KEY = ("scale", "seed", "kind", "low", "high")
COLUMNS = (*KEY, "steps", "study", "p_noise", "log_uniform", "levels", "loss", "dynamics")
COLUMNS += ("seconds", "command", "commit", "hardware")
Interval = tuple[int, int]  # cells low..high - 1 of the grid
Losses = Mapping[Interval, float]


# ---------------------------------------------------------------------------------------------------------------------
# Partitions of the grid


def intervals() -> list[Interval]:
    """Returns all intervals between two levels of the grid."""
    return list(itertools.combinations(range(len(GRID)), 2))


def best_edges(losses: Losses, num_blocks: int) -> tuple[float, tuple[int, ...]]:
    """Returns the least sum of losses of any partition into that many blocks, and its edges, by dynamic programming."""

    @cache
    def best(end: int, blocks: int) -> tuple[float, tuple[int, ...]]:
        if blocks == 1:
            return losses[0, end], (0, end)
        options = []
        for start in range(blocks - 1, end):
            below, edges = best(start, blocks - 1)
            options.append((below + losses[start, end], (*edges, end)))
        return min(options)

    return best(len(GRID) - 1, num_blocks)


def loss_of(losses: Losses, edges: tuple[int, ...]) -> float:
    """Returns the sum of losses of a partition."""
    return sum(losses[pair] for pair in itertools.pairwise(edges))


def all_partitions(num_blocks: int) -> list[tuple[int, ...]]:
    """Returns every partition of the grid into that many blocks, as ascending edges."""
    last = len(GRID) - 1
    return [(0, *inner, last) for inner in itertools.combinations(range(1, last), num_blocks - 1)]


def equal_parts(levels: np.ndarray, density: np.ndarray, num_blocks: int) -> tuple[int, ...] | None:
    """Returns the partition of the grid closest to equal integrals of a density; None where it is 0 everywhere.

    Args:
        levels: (L,) ascending centres of cells of equal width in log sigma; density: (L,) per log sigma, not negative.
    """
    if not density.any():
        return None
    edges_of_cells = np.geomspace(GRID[0], GRID[-1], len(levels) + 1)
    share = np.concatenate([[0.0], np.cumsum(density) / density.sum()])
    at_grid = np.interp(np.log(GRID), np.log(edges_of_cells), share)
    wanted = np.arange(1, num_blocks) / num_blocks
    return min(all_partitions(num_blocks), key=lambda edges: float(np.abs(at_grid[list(edges[1:-1])] - wanted).sum()))


# ---------------------------------------------------------------------------------------------------------------------
# Experts and pilots: ordinary runs


def check_typed(overrides: Iterable[str], varied: Iterable[str]) -> None:
    """Refuses keys that a study varies itself.

    Raises:
        SettingError: one of them was typed.
    """
    for override in overrides:
        key = override.partition("=")[0]
        require(key not in varied, f"{key} was typed, but the study sets it for each of its runs: leave it out, or give --seeds")


def expert_config(overrides: list[str], seed: int, low: float, high: float, depth: int) -> Config:
    """Returns the run of one network over [low, high]."""
    check_typed(overrides, VARIED)
    typed = [*EXPERT, f"seed={seed}", f"model.depth={depth}", f"objective.sigma_min={low}", f"objective.sigma_max={high}"]
    assert entry_point.store.list("data")  # importing main registers the schema
    with initialize_config_dir(str(Path(entry_point.__file__).resolve().parent / "configs"), version_base="1.3"):
        composed = compose("config", ["scale=digits", *typed, *overrides])
    OmegaConf.resolve(composed)
    config = OmegaConf.to_object(composed)
    config.train.evaluate_every = max(config.train.steps // TENTHS, 1)
    return configuration.resolve(config)


def study_of(config: Config) -> str:
    """Returns a short hash of all that the experts of one study share: how they are trained and scored."""
    trained = {key: value for key, value in flatten(configuration.trained_identity(config)).items() if not is_under(key, VARIED)}
    return digest([trained, config.eval.loss_images, config.eval.loss_levels, config.eval.seed])


def dynamics(config: Config, folder: Path) -> np.ndarray:
    """Returns E||dD/d ln sigma|| at each level of the held-out grid, (L,), along z = x + sigma eps, by central differences."""
    model = checkpoint.load_model(folder, device=config.device)
    data = generation.load(config)
    x, labels = generation.heldout(config, data, config.eval.loss_images)
    denoiser, step = model.denoiser(labels), 0.05
    found = []
    with torch.inference_mode():
        for level in loss_grid(model.objective.distribution, config.eval.loss_levels).levels.tolist():
            noise = torch.randn(x.shape, generator=generator(config.eval.seed, "dynamics"))
            low, high = max(level * np.exp(-step), GRID[0]), min(level * np.exp(step), GRID[-1])
            difference = denoiser(x + high * noise, high) - denoiser(x + low * noise, low)
            found.append(float(difference.flatten(1).norm(dim=1).mean() / np.log(high / low)))
    return np.array(found)


def measure(overrides: list[str], seed: int, path: Path) -> None:
    """Trains and scores one seed's experts and pilots, adding a row for each to a CSV file.

    Raises:
        SettingError: steps of which there is no tenth, or settings other than those of the experts of this scale that are there.
    """
    usual = expert_config(overrides, seed, GRID[0], GRID[-1], DEPTH)
    steps, study = usual.train.steps, study_of(usual)
    require(steps % TENTHS == 0, f"train.steps={steps} is not a multiple of {TENTHS}: experts are compared after tenths of it")
    scale = next((typed.partition("=")[2] for typed in reversed(overrides) if typed.startswith("scale=")), "digits")
    command = command_of("-m experiments.edges", [*overrides, f"--seeds={seed}"])
    rows = read_records(path, COLUMNS)
    others = {row["command"] for row in rows if row["scale"] == scale and row["study"] != study}
    require(not others, f"{path} has a study of scale={scale} with other settings, {min(others, default='')}: set --records")

    def run(kind: str, low: float, high: float, depth: int, *extra: str) -> None:
        config = expert_config([*overrides, *extra], seed, low, high, depth)
        folder = pipeline.run(config)
        result = next(r for r in pipeline.read_results(folder) if r["kind"] == "heldout_loss")
        curve = read_metrics(folder / "heldout.jsonl")
        row = {
            "scale": scale,
            "seed": seed,
            "kind": kind,
            "low": low,
            "high": high,
            "steps": config.train.steps,
            "study": study,
            "p_noise": numbers(r["integrated"] for r in curve),
            "log_uniform": numbers(r["log_uniform"] for r in curve),
            "levels": numbers(result["by_level"]["levels"]) if kind != "expert" else "",
            "loss": numbers(result["by_level"]["loss"]) if kind != "expert" else "",
            "dynamics": numbers(dynamics(config, folder)) if kind == "shallow_pilot" else "",
            "seconds": train_seconds(checkpoint.read_run(folder)),
            "command": command,
            "commit": short_commit(result["protocol"]["trained_at"]),
            "hardware": hardware_of(result),
        }
        replace_rows(rows, [row], KEY)
        rows.sort(key=lambda row: [str(row[key]) for key in KEY])
        write_rows(path, rows, COLUMNS)

    pilot = 3 * steps // TENTHS  # a tenth of the layer work of three blocks
    run("shallow_pilot", GRID[0], GRID[-1], DEPTH, f"train.steps={pilot}")
    run("deep_pilot", GRID[0], GRID[-1], DEEP, f"train.steps={pilot * DEPTH // DEEP}")
    for low, high in intervals():
        run("expert", GRID[low], GRID[high], DEPTH)


def numbers(values: Iterable[float]) -> str:
    """Returns numbers as one cell of a CSV file."""
    return " ".join(f"{value:.6g}" for value in values)


# ---------------------------------------------------------------------------------------------------------------------
# From rows to regrets


def weights(weighting: str) -> np.ndarray:
    """Returns the share of q below each level of the grid, ascending from 0 to 1."""
    if weighting == "log_uniform":
        return np.log(np.array(GRID) / GRID[0]) / np.log(GRID[-1] / GRID[0])
    return LogNormalLevels().cdf(torch.tensor(GRID, dtype=torch.float64)).numpy()


def losses_of(rows: list[dict[str, str]], seed: str, weighting: str, tenth: int) -> dict[Interval, float]:
    """Returns each interval's part of J, after so many tenths of the experts' steps."""
    index, below = {f"{level:g}": i for i, level in enumerate(GRID)}, weights(weighting)
    found = {}
    for row in rows:
        if row["seed"] == seed and row["kind"] == "expert":
            low, high = index[f"{float(row['low']):g}"], index[f"{float(row['high']):g}"]
            found[low, high] = (below[high] - below[low]) * float(row[weighting].split()[tenth - 1])
    return found


def candidates(
    rows: list[dict[str, str]], seed: str, weighting: str, num_blocks: int
) -> dict[str, tuple[tuple[int, ...] | None, int]]:
    """Returns each candidate's edges, and the tenths of the steps that its pilots leave to the experts.

    After pilots so short that the deep one is ahead of the shallow one at no level there is no reducible loss, and no edges.
    """
    pilots = {row["kind"]: row for row in rows if row["seed"] == seed and row["kind"] != "expert"}
    shallow, deep = (np.array(pilots[kind]["loss"].split(), float) for kind in ("shallow_pilot", "deep_pilot"))
    levels = np.array(pilots["shallow_pilot"]["levels"].split(), float)
    p_noise = loss_grid(LogNormalLevels(), len(levels)).mass
    q = p_noise if weighting == "p_noise" else np.ones_like(p_noise)
    arc = np.sqrt(np.array(pilots["shallow_pilot"]["dynamics"].split(), float))
    return {
        "equal probability": (equal_parts(levels, p_noise, num_blocks), TENTHS),
        "equal in log sigma": (equal_parts(levels, np.ones_like(p_noise), num_blocks), TENTHS),
        "equal loss": (equal_parts(levels, q * shallow, num_blocks), TENTHS - 1),
        "equal reducible loss": (equal_parts(levels, q * np.maximum(shallow - deep, 0), num_blocks), TENTHS - 2),
        "equal arc of the dynamics": (equal_parts(levels, p_noise * arc, num_blocks), TENTHS - 1),
    }


def complete_seeds(rows: list[dict[str, str]]) -> list[str]:
    """Returns the seeds of which all experts and both pilots are there."""
    count = len(intervals()) + 2
    seeds = sorted({row["seed"] for row in rows}, key=int)
    return [seed for seed in seeds if sum(row["seed"] == seed for row in rows) == count]


def section(rows: list[dict[str, str]]) -> list[str]:
    """Returns the report's part: the oracle's edges for every number of blocks, and the candidates' regrets for three."""
    lines = []
    for scale in sorted({row["scale"] for row in rows}):
        own = [row for row in rows if row["scale"] == scale]
        seeds = complete_seeds(own)
        if not seeds:
            continue
        expert = next(row for row in own if row["kind"] == "expert")
        lines.append(
            f"### {scale}\n\n{len(intervals())} experts of {DEPTH} layers and {expert['steps']} steps a seed, seeds "
            f"{', '.join(seeds)}; edges from the grid {', '.join(f'{level:.3g}' for level in GRID)}. A seed's command: "
            f"`{expert['command']}`, on {expert['hardware']}.\n"
        )
        for weighting in WEIGHTINGS:
            lines.append(f"#### Best under {weighting}\n")
            lines += weighting_tables(own, seeds, weighting)
    return ["## Where should the edges be?\n", f"{ABOUT}\n", *lines] if lines else []


def weighting_tables(rows: list[dict[str, str]], seeds: list[str], weighting: str) -> list[str]:
    """Returns the two tables of one weighting."""
    by_seed = {seed: losses_of(rows, seed, weighting, TENTHS) for seed in seeds}
    mean = {pair: float(np.mean([losses[pair] for losses in by_seed.values()])) for pair in intervals()}
    table = [
        "| blocks | oracle's edges | its J | equal probability's J | best of one seed, per seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for num_blocks in (2, 3, 4, 6):
        least, edges = best_edges(mean, num_blocks)
        equal, _ = candidates(rows, seeds[0], weighting, num_blocks)["equal probability"]
        own = "; ".join(inner(best_edges(by_seed[seed], num_blocks)[1]) for seed in seeds)
        table.append(f"| {num_blocks} | {inner(edges)} | {least:.4f} | {loss_of(mean, equal):.4f} | {own} |")

    _, oracle = best_edges(mean, 3)
    regrets: dict[str, list[float]] = {}
    chosen: dict[str, list[str]] = {}
    for seed in seeds:
        least = loss_of(by_seed[seed], oracle)
        for name, (edges, tenth) in candidates(rows, seed, weighting, 3).items():
            if edges is None:
                chosen.setdefault(name, []).append("none")
                continue
            regrets.setdefault(name, []).append(loss_of(losses_of(rows, seed, weighting, tenth), edges) - least)
            chosen.setdefault(name, []).append(inner(edges))
        everything = [loss_of(by_seed[seed], edges) for edges in all_partitions(3)]
        regrets.setdefault("random: mean of all partitions", []).append(float(np.mean(everything)) - least)
    table += ["", "| three blocks | edges, per seed | regret to the oracle | standard error |", "| --- | --- | --- | --- |"]
    for name, values in sorted(regrets.items(), key=lambda item: np.mean(item[1])):
        error = f"{np.std(values, ddof=1) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
        edges = "; ".join(dict.fromkeys(chosen.get(name, [])))
        table.append(f"| {name} | {edges} | {np.mean(values):+.4f} | {error} |")
    for name in sorted(chosen.keys() - regrets.keys()):
        table.append(f"| {name} | none: the deep pilot is ahead of the shallow one nowhere | | |")
    return ["\n".join(table) + "\n"]


def inner(edges: tuple[int, ...]) -> str:
    """Returns a partition's inner edges as levels."""
    return ", ".join(f"{GRID[edge]:.3g}" for edge in edges[1:-1])


def main() -> None:
    """Trains what is missing; the report is drawn from the rows by experiments.report."""
    parser = argparse.ArgumentParser(description="Train an expert for every interval of a grid of levels.")
    parser.add_argument("overrides", nargs="*", help="of the runs, such as out=FOLDER threads=1 train.steps=1000")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--records", type=Path, default=RECORDS / "edges.csv", help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        arguments.records.parent.mkdir(parents=True, exist_ok=True)
        for seed in arguments.seeds:
            measure(arguments.overrides, seed, arguments.records)
    except (SettingError, NonFiniteLoss, WriteError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: the rows in {arguments.records} cannot be written ({error}): set --records")


if __name__ == "__main__":
    main()
