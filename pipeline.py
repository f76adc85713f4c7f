"""What one configuration does: check everything, then train, sample, evaluate or merge in the run's folder.

What is particular to a kind of model (its data, samples and scores) is in a module of its own, which kinds.KINDS names.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import checkpoint
import config as configuration
import generation
import hardware as machine
import latents
import parallel
import plots
import profiling
import sampler
import train as training
from config import Config, SamplerConfig, SettingError, require
from data import ImageData
from hardware import Hardware
from kinds import KINDS, build_objective, trained_parts
from parallel import World


def run(config: Config, asked: dict[str, Any] | None = None, wait: bool = False) -> Path:
    """Runs a resolved configuration and returns the run's folder.

    Args:
        asked: which table wants the run, as main.py knows it; kept beside the scores.
        wait: for a process that works in the folder, as in a sweep of which two settings are the same run.

    Raises:
        SettingError: a setting that cannot work, before any work.
    """
    folder = latents.shard_folder(config.data) if config.mode == "encode" else configuration.run_folder(config)
    hardware = machine.set_up(parallel.local_device(config.device), config.train.precision, config.threads)
    with parallel.joined(hardware.device) as world, contextlib.ExitStack() as held:
        with world.in_turn():  # the others start when the settings are right; what is wrong is said once
            if world.first:
                parts = [trained_parts(config, block) for block in range(configuration.trained_blocks(config))]
                parallel.check(config, world, shared=any(len(names) > 1 for names in parts))
                if config.mode in ("profile", "plan"):
                    cost(config, folder, hardware)
                    return folder
                if config.mode != "merge":
                    check(config, folder, hardware)
            else:
                held.enter_context(contextlib.redirect_stdout(held.enter_context(open(os.devnull, "w"))))
        if config.mode == "merge":
            merge(config, folder)
            return folder
        with world.in_turn():  # what the first decodes into the cache, the others find there
            data = None if config.mode in ("sample", "encode") else KINDS[config.model.name].load(config)
        if world.first:
            held.enter_context(checkpoint.locked(folder, wait))
        world.wait()
        if config.mode == "encode":
            latents.encode(config.data, hardware.device, world, config.log.progress)
            return folder
        if config.mode in ("run", "train"):
            where = f"{hardware.precision} on {hardware.device}, {hardware.threads} threads"
            where += f", {world.size} processes" if world.size > 1 else ""
            print(f"{folder}: {where}, data scaled by {data.scale:.4f}")
            if config.train.parallel == "blocks":
                train_apart(config, data, folder, hardware, world)
            else:
                train(config, data, folder, hardware, world)
            print(f"trained: {folder / 'checkpoint'}")
        if config.mode in ("run", "sample", "evaluate"):
            use(config, data, folder, hardware, asked or {}, world)
        world.wait()
    return folder


def cost(config: Config, folder: Path, hardware: Hardware) -> None:
    """Measures what training and sampling cost, or predicts what fits a memory."""
    checkpoint.check_folder(folder)
    print(f"{folder}: {hardware.precision} on {hardware.device}, {hardware.threads} threads")
    if config.mode == "profile":
        profiling.profile(config, hardware, folder)
    else:
        profiling.plan(config, hardware, folder)


def check(config: Config, folder: Path, hardware: Hardware) -> None:
    """Refuses what cannot work as far as it can be known without work: machine, data, folder, features, checkpoint."""
    if config.mode in ("run", "train"):
        training.check(config, hardware)
    if config.mode in ("sample", "evaluate"):
        require(
            checkpoint.read_run(folder) is not None,
            f"{folder} holds no checkpoint: train with the same settings first, or set folder= to a run's folder",
        )
    checkpoint.check_folder(folder)
    if config.mode in ("run", "sample", "evaluate") and config.model.name == "dit":
        sampler.check_room(config.sampler, generation.image_shape(config), folder)
    read_results(folder)
    read_tables(folder)
    if config.mode == "encode":
        latents.check_encode(config.data)
    elif config.mode != "sample":
        KINDS[config.model.name].check(config)


@contextlib.contextmanager
def reporter(config: Config, folder: Path, world: World) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what receives each row of metrics.jsonl: wandb, or nothing."""
    if config.log.wandb == "off" or not world.first:
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


def train(config: Config, data: ImageData, folder: Path, hardware: Hardware, world: World) -> None:
    """Trains the job's blocks, drawing the partition first and samples at intervals; the world's processes share them."""
    kind = KINDS[config.model.name]
    description = training.describe(config, data.fingerprint, data.scale, hardware, machine.environment(), world.size)
    warnings = checkpoint.check_resume(folder, description)
    if world.first:
        for warning in warnings:
            print(f"warning: {warning}")
        for name in ("plots", "samples"):
            (folder / name).mkdir(exist_ok=True)
        configuration.save_config(config, folder / "config.yaml")
        kind.plot_partition(config, folder / "plots" / "partition.png")

    def draw_grid(modules: Mapping[str, nn.Module], path: Path) -> None:
        kind.preview(config, modules, data.scale, hardware, path)

    def measure(modules: Mapping[str, nn.Module], step: int) -> None:
        curve = folder / "heldout.jsonl"
        rows = [row for row in training.read_metrics(curve) if row["step"] < step]
        rows.append({"step": step, **kind.measure(config, modules, data, hardware)})
        checkpoint.write_atomically(curve, "".join(json.dumps(row) + "\n" for row in rows))

    with reporter(config, folder, world) as report:
        source = kind.source(config, data, hardware.device)
        training.train(config, build_objective(config), source, folder, hardware, description, draw_grid, measure, report, world)


def train_apart(config: Config, data: ImageData, folder: Path, hardware: Hardware, world: World) -> None:
    """Trains every block in a job of its own, each process or group of processes its share of them, and joins them."""
    blocks = configuration.owned_blocks(config)
    steps = training.steps_per_block(config, build_objective(config))
    run_file = checkpoint.read_run(folder)
    world.wait()  # all have read the file that the first one may replace below
    if run_file is not None and [run_file["parts"][trained_parts(config, block)[0]]["step"] for block in blocks] == steps:
        return
    groups = min(world.size, len(blocks))
    group, sharing = world.split(groups)
    for block in blocks[group::groups]:
        job = configuration.job_config(config, block)
        job.log = dataclasses.replace(config.log, progress=config.log.progress and world.first)
        target = configuration.run_folder(job)
        require(
            run_file is None or checkpoint.read_run(target) is not None,
            f"{folder} holds a checkpoint, but {target}, where block {block} would go on, does not: leave train.parallel out",
        )
        with checkpoint.locked(target) if sharing.first else contextlib.nullcontext():
            train(job, data, target, hardware, sharing)
    world.wait()
    if world.first:
        merge(config, folder, again=True)
    world.wait()


def merge(config: Config, folder: Path, again: bool = False) -> None:
    """Joins runs that trained different blocks into the folder that one job over all blocks would have.

    Args:
        again: the folder is held already, and what the same runs were joined to before is replaced.
    """
    folders = [Path(path) for path in config.merge.runs] or configuration.job_folders(config)
    identity = configuration.trained_identity(config)
    counts = enumerate(training.steps_per_block(config, build_objective(config)))
    steps = {trained_parts(config, block)[0]: count for block, count in counts}
    owners = checkpoint.check_merge(folders, folder, identity, steps, config.merge.force, config.merge.replace, again)
    with contextlib.nullcontext() if again else checkpoint.locked(folder):
        (folder / "plots").mkdir(exist_ok=True)
        configuration.save_config(config, folder / "config.yaml")
        rows = [row for path in folders for row in training.read_metrics(path / "metrics.jsonl")]
        checkpoint.write_atomically(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        KINDS[config.model.name].plot_partition(config, folder / "plots" / "partition.png")
        plots.plot_training_loss(rows, folder / "plots" / "loss.png", len(steps))
        checkpoint.merge(owners, folder, identity)
    print(f"joined {', '.join(owners)} in {folder}; mode=sample and mode=evaluate find it with the same settings")


# ---------------------------------------------------------------------------------------------------------------------
# Use of a trained model


def use(config: Config, data: ImageData | None, folder: Path, hardware: Hardware, asked: dict[str, Any], world: World) -> None:
    """Samples from a trained model, or samples and scores it; scores that are there already are not computed again.

    Processes divide the samples, and the first one scores.
    """
    kind = KINDS[config.model.name]
    run_file = checkpoint.read_run(folder)
    blocks = range(configuration.trained_blocks(config))
    missing = sorted({name for block in blocks for name in trained_parts(config, block)} - run_file["parts"].keys())
    if missing and config.mode == "run":
        print(f"trained {', '.join(run_file['parts'])}; mode=merge joins it with {', '.join(missing)}")
        return
    require(not missing, f"{folder} lacks {', '.join(missing)}: join the blocks' runs by mode=merge first")
    weights = weights_protocol(config, run_file)
    question = configuration.digest([dataclasses.asdict(config.eval), dataclasses.asdict(config.sampler), weights])
    results = [result for result in read_results(folder) if question in result["questions"]]
    if config.mode == "sample" or not results:
        resident = config.sampler.resident if isinstance(config.sampler, SamplerConfig) else "all"
        model = checkpoint.load_model(folder, config.sampler.weights, str(hardware.device), resident=resident)
        if config.mode == "sample":
            print(f"samples: {kind.sample(config, model, weights, folder, config.sampler, world)}")
            return
        for settings in kind.sample_sets(config) if world.size > 1 else ():
            kind.sample(config, model, weights, folder, settings, world)
        if not world.first:
            return
        results = kind.evaluate(config, data, model, weights, folder, hardware)
        environment = {**machine.environment(), "device": hardware.name}
        for result in results:
            result["protocol"] = {**result["protocol"], **weights, "environment": environment}
            result["questions"] = [question]
        write_results(folder, results)
    if not world.first:
        return
    if asked.get("experiment"):
        write_asked(folder, {**asked, "question": question})
    print_results(results, folder)


def weights_protocol(config: Config, run_file: dict[str, Any]) -> dict[str, Any]:
    """Returns what identifies the weights that made a result."""
    parts = run_file["parts"]
    return {
        "weights": config.sampler.weights,
        "steps_trained": {name: part["step"] for name, part in parts.items()},
        "checksums": {name: part["files"]["weights"]["sha256"] for name, part in parts.items()},
        "trained": run_file["identity"],
        "trained_on": run_file["machines"][-1],
        **({"machines": run_file["machines"]} if len(run_file["machines"]) > 1 else {}),
        "trained_at": run_file["commit"],
        "data_fingerprint": run_file["data"]["fingerprint"],
    }


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns the results in results.json, of all that was asked so far.

    Raises:
        SettingError: the file was damaged.
    """
    return read_list(
        folder / "results.json", "results", ("kind", "protocol", "questions", "title", "scores"), "scores are computed again"
    )


def write_results(folder: Path, results: list[dict[str, Any]]) -> None:
    """Adds results to results.json; one of the same kind and protocol takes the earlier one's place, and its questions."""
    new = {result_key(result): result for result in results}
    kept = []
    for result in read_results(folder):
        if (key := result_key(result)) in new:
            new[key]["questions"] += [question for question in result["questions"] if question not in new[key]["questions"]]
        else:
            kept.append(result)
    checkpoint.write_atomically(folder / "results.json", json.dumps(kept + results, indent=1) + "\n")


def write_asked(folder: Path, asked: dict[str, Any]) -> None:
    """Adds to tables.json which table wants which of the results; experiments/collect.py makes records of these."""
    known = read_tables(folder)
    if asked not in known:
        checkpoint.write_atomically(folder / "tables.json", json.dumps([*known, asked], indent=1) + "\n")


def read_tables(folder: Path) -> list[dict[str, Any]]:
    """Returns which table wants which of the results, from tables.json.

    Raises:
        SettingError: the file was damaged.
    """
    return read_list(folder / "tables.json", "tables", ("experiment", "question"), "repeat each table's command")


def read_list(path: Path, what: str, keys: Sequence[str], remedy: str) -> list[dict[str, Any]]:
    """Returns a file's list of records that have these keys; an empty one where there is no file.

    Raises:
        SettingError: it is something else; `remedy` is what to do once it is out of the way.
    """
    try:
        rows = json.loads(path.read_text()) if path.exists() else []
        for row in rows:
            [row[key] for key in keys]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise SettingError(f"{path} is not a list of {what} ({error}): move it away, and {remedy}") from None
    return rows


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
