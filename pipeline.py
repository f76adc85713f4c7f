"""What one configuration does: check everything, then train, sample, evaluate or merge in the run's folder.

What is particular to a kind of model (its data, samples and scores) is in a module of its own: `generation`.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import checkpoint
import config as configuration
import evaluation
import generation
import hardware as machine
import profiling
import train as training
from config import Config, SettingError, require
from data import ImageData
from hardware import Hardware
from model import OneResident, build_objective, part_name

# By model.name: the module that knows what this kind of model is for.
KINDS = {"dit": generation}


def run(config: Config) -> Path:
    """Runs a resolved configuration and returns the run's folder.

    Raises:
        SettingError: a setting that cannot work, before any work.
    """
    folder = configuration.run_folder(config)
    hardware = machine.set_up(config.device, config.train.precision, config.threads)
    if config.mode in ("profile", "plan"):
        cost(config, folder, hardware)
        return folder
    check(config, folder, hardware)
    with checkpoint.locked(folder):
        if config.mode == "merge":
            merge(config, folder)
            return folder
        data = KINDS[config.model.name].load(config)
        if config.mode in ("run", "train"):
            where = f"{hardware.precision} on {hardware.device}, {hardware.threads} threads"
            print(f"{folder}: {where}, data scaled by {data.scale:.4f}")
            train(config, data, folder, hardware)
        if config.mode in ("run", "sample", "evaluate"):
            use(config, data, folder, hardware)
    return folder


def cost(config: Config, folder: Path, hardware: Hardware) -> None:
    """Measures what training and sampling cost, or predicts what fits a memory."""
    kind = KINDS[config.model.name]
    require(hasattr(kind, "stand_in"), f"mode={config.mode} is not there for model={config.model.name}")
    print(f"{folder}: {hardware.precision} on {hardware.device}, {hardware.threads} threads")
    if config.mode == "profile":
        profiling.profile(config, kind, hardware, folder)
    else:
        profiling.plan(config, kind, hardware, folder)


def check(config: Config, folder: Path, hardware: Hardware) -> None:
    """Refuses what cannot work as far as it can be known without work: machine, data, folder, features, checkpoint."""
    if config.mode in ("run", "train"):
        training.check(config, hardware)
    if config.mode in ("sample", "evaluate"):
        require(
            checkpoint.read_run(folder) is not None,
            f"{folder} holds no checkpoint: train with the same settings first, or set folder= to a run's folder",
        )
    if config.mode != "merge":
        KINDS[config.model.name].check(config)
    checkpoint.make_folder(folder)


@contextlib.contextmanager
def reporter(config: Config, folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what receives each row of metrics.jsonl: wandb, or nothing."""
    if config.log.wandb == "off":
        yield lambda row: None
        return
    import wandb

    try:
        session = wandb.init(
            project=config.log.project,
            name=folder.name,
            id=configuration.digest(str(folder.resolve())),
            dir=folder,
            mode=config.log.wandb,
            resume="allow",
            config=dataclasses.asdict(config),
            settings=wandb.Settings(init_timeout=20, console="off", silent=True),
        )
    except (wandb.errors.Error, OSError) as error:
        raise SettingError(f"log.wandb=online: wandb cannot be reached ({error}); set log.wandb=offline or off") from None
    with session:
        yield lambda row: session.log({f"block_{row['block']}/{key}": row[key] for key in ("step", "loss", "rate", "seconds")})


def train(config: Config, data: ImageData, folder: Path, hardware: Hardware) -> None:
    """Trains the job's blocks, drawing the partition first and samples at intervals."""
    kind = KINDS[config.model.name]
    description = training.describe(config, data.fingerprint, data.scale, hardware, evaluation.environment())
    for warning in checkpoint.check_resume(folder, description):
        print(f"warning: {warning}")
    for name in ("plots", "samples"):
        (folder / name).mkdir(exist_ok=True)
    configuration.save_config(config, folder / "config.yaml")
    kind.plot_partition(config, folder / "plots" / "partition.png")

    def draw_grid(modules: Mapping[str, nn.Module] | OneResident, path: Path) -> None:
        kind.preview(config, modules, data.scale, hardware, path)

    with reporter(config, folder) as report:
        source = kind.source(config, data, hardware.device)
        training.train(config, build_objective(config), source, folder, hardware, description, draw_grid, report)


def merge(config: Config, folder: Path) -> None:
    """Joins runs that trained different blocks into the folder that one job over all blocks would have."""
    folders = [Path(path) for path in config.merge.runs]
    identity = json.loads(json.dumps(configuration.trained_identity(config)))
    blocks = configuration.owned_blocks(config)
    run_file = checkpoint.merge(folders, folder, identity, blocks, config.merge.force)
    configuration.save_config(config, folder / "config.yaml")
    rows = [row for path in folders for row in training.read_metrics(path / "metrics.jsonl")]
    checkpoint.write_atomically(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    print(f"joined {', '.join(run_file['parts'])} in {folder}; mode=sample and mode=evaluate find it with the same settings")


# ---------------------------------------------------------------------------------------------------------------------
# Use of a trained model


def use(config: Config, data: ImageData, folder: Path, hardware: Hardware) -> None:
    """Samples from a trained model, or samples and scores it."""
    kind = KINDS[config.model.name]
    run_file = checkpoint.read_run(folder)
    missing = sorted(set(map(part_name, range(configuration.trained_blocks(config)))) - run_file["parts"].keys())
    if missing and config.mode == "run":
        print(f"trained {', '.join(run_file['parts'])}; mode=merge joins it with {', '.join(missing)}")
        return
    require(not missing, f"{folder} lacks {', '.join(missing)}: join the blocks' runs by mode=merge first")
    model = checkpoint.load_model(folder, config.sampler.weights, str(hardware.device), resident=config.sampler.resident)
    weights = weights_protocol(config, run_file)
    if config.mode == "sample":
        print(f"samples: {kind.sample(config, model, weights, folder, config.sampler)}")
        return
    results = kind.evaluate(config, data, model, weights, folder, hardware)
    environment = evaluation.environment()
    for result in results:
        result["protocol"] = {**result["protocol"], **weights, "environment": environment}
    write_results(folder, results)
    print_results(results, folder)


def weights_protocol(config: Config, run_file: dict[str, Any]) -> dict[str, Any]:
    """Returns what identifies the weights that made a result."""
    parts = run_file["parts"]
    return {
        "weights": config.sampler.weights,
        "steps_trained": {name: part["step"] for name, part in parts.items()},
        "checksums": {name: part["files"]["weights"]["sha256"] for name, part in parts.items()},
        "trained": run_file["identity"],
        "trained_on": run_file["machine"],
        "data_fingerprint": run_file["data"]["fingerprint"],
    }


def write_results(folder: Path, results: list[dict[str, Any]]) -> None:
    """Adds results to results.json; one of the same kind and protocol takes the place of the earlier one."""
    path = folder / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    new = {result_key(result) for result in results}
    rows = [result for result in kept if result_key(result) not in new] + results
    checkpoint.write_atomically(path, json.dumps(rows, indent=1) + "\n")


def result_key(result: dict[str, Any]) -> str:
    """Returns what tells whether two results answer the same question; where and when they were computed does not."""
    return configuration.digest([result["kind"], {k: v for k, v in result["protocol"].items() if k != "environment"}])


def print_results(results: list[dict[str, Any]], folder: Path) -> None:
    """Prints the scores, one column per result, and where everything is."""
    rows: dict[str, list[str]] = {}
    for column, result in enumerate(results):
        for name, value in result["scores"].items():
            number = value["value"] if isinstance(value, dict) and "value" in value else value
            if isinstance(number, int | float):
                rows.setdefault(name, [""] * len(results))[column] = f"{number:.4g}"
    width = max(map(len, rows))
    titles = [result["title"] for result in results]
    widths = [max(len(title), 10) for title in titles]
    print(" " * width, *(title.rjust(size) for title, size in zip(titles, widths, strict=True)), sep="  ")
    for name, cells in rows.items():
        print(name.ljust(width), *(cell.rjust(size) for cell, size in zip(cells, widths, strict=True)), sep="  ")
    for result in results:
        for one in result.get("sets", []):
            print(f"pictures, {result['title']}: {folder / one['images'] / 'grid.png'}")
    print(f"scores: {folder / 'results.json'}")
    print(f"plots: {folder / 'plots'}")
