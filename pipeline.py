"""What one configuration does: check everything, then train, sample, evaluate or merge in the run's folder."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import evaluation
import torch
from torch import Tensor, nn

import checkpoint
import config as configuration
import data as data_sets
import hardware as machine
import plots
import sampler
import train as training
from config import Config, SettingError, require
from data import BatchSource, ImageData
from hardware import Hardware
from model import Model, build_model, build_objective

GRID_IMAGES = 40  # of the pictures that are drawn during training


def run(config: Config) -> Path:
    """Runs a resolved configuration and returns the run's folder.

    Raises:
        SettingError: a setting that cannot work, before any work.
    """
    folder = configuration.run_folder(config)
    hardware = machine.set_up(config.device, config.train.precision, config.threads)
    check(config, folder)
    with checkpoint.locked(folder):
        if config.mode == "merge":
            merge(config, folder)
            return folder
        data = load_data(config)
        if config.mode in ("run", "train"):
            configuration.save_config(config, folder / "config.yaml")
            where = f"{hardware.precision} on {hardware.device}, {hardware.threads} threads"
            print(f"{folder}: {where}, data scaled by {data.scale:.4f}")
            with reporter(config, folder) as report:
                train(config, data, folder, hardware, report)
        if config.mode in ("run", "sample", "evaluate"):
            run_file = checkpoint.read_run(folder)
            model = checkpoint.load_model(folder, config.sampler.weights, str(hardware.device))
            missing = sorted(set(range(model.objective.partition.num_blocks)) - set(model.backbones))
            if missing and config.mode == "run":
                print(f"trained {', '.join(run_file['parts'])}; mode=merge joins it with the other blocks")
                return folder
            require(not missing, f"{folder} lacks block {missing}: join the blocks' runs by mode=merge first")
            if config.mode == "sample":
                print(f"images: {sample(config, model, run_file, folder, config.sampler)}")
            else:
                evaluate(config, data, model, run_file, folder, hardware)
    return folder


def check(config: Config, folder: Path) -> None:
    """Refuses what cannot work as far as it can be known without work: data, folder, features, checkpoint."""
    if config.mode in ("sample", "evaluate"):
        require(
            checkpoint.read_run(folder) is not None,
            f"{folder} holds no checkpoint: train with the same settings first, or set folder= to a run's folder",
        )
    checkpoint.make_folder(folder)
    if config.mode == "merge":
        return
    data_sets.check_images(**image_settings(config))
    if config.mode in ("run", "evaluate") and config.train.blocks == "all" and config.eval.features is not None:
        evaluation.check_scores(
            config.data.name,
            (config.data.channels, config.data.size, config.data.size),
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


def image_settings(config: Config) -> dict[str, Any]:
    """Returns data.load_images's arguments."""
    settings = dataclasses.asdict(config.data)
    for key in ("channels", "num_classes"):
        del settings[key]
    return {**settings, "sigma_data": config.objective.sigma_data}


def load_data(config: Config) -> ImageData:
    """Loads the data and checks that they are what the model is built for."""
    data = data_sets.load_images(**image_settings(config))
    require(data.channels == config.data.channels, f"data.channels={config.data.channels}: the images have {data.channels}")
    require(
        config.data.num_classes in (0, data.num_classes),
        f"data.num_classes={config.data.num_classes}: the data have {data.num_classes}",
    )
    return data


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


def train(config: Config, data: ImageData, folder: Path, hardware: Hardware, report: Callable[[dict[str, Any]], None]) -> None:
    """Trains the job's blocks and draws the partition."""
    preview = dataclasses.replace(config.sampler, num_images=GRID_IMAGES)

    def draw_grid(modules: dict[str, nn.Module], path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        model = build_model(config, modules, data.scale, hardware)
        plots.image_grid(sampler.sample_images(model, preview)[0], path, columns=10)

    (folder / "plots").mkdir(exist_ok=True)
    objective = build_objective(config)
    intervals = [objective.interval(block) for block in range(objective.partition.num_blocks)]
    plots.plot_partition(objective.distribution, objective.partition.edges, intervals, folder / "plots" / "partition.png")
    source = BatchSource(data, hardware.device, seed=config.seed)
    description = training.describe(config, data.fingerprint, data.scale, hardware, evaluation.environment())
    training.train(config, objective, source, folder, hardware, description, draw_grid, report)


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
# Sampling and scores


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


def sample(config: Config, model: Model, run_file: dict[str, Any], folder: Path, settings: configuration.SamplerConfig) -> Path:
    """Draws the settings' images and returns the path of their .npz."""
    protocol = {"sampler": dataclasses.asdict(settings), **weights_protocol(config, run_file)}
    guidance = settings.guidance if isinstance(settings.guidance, int | float) else "list"
    name = f"guidance_{guidance:g}" if guidance != "list" else "guidance_list"
    key = configuration.digest(protocol, 8)
    return sampler.write_images(model, settings, folder / "samples" / f"{name}_{key}", protocol, config.log.progress)


def evaluate(
    config: Config, data: ImageData, model: Model, run_file: dict[str, Any], folder: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """Scores a trained model; every score goes into results.json with its protocol, and the main ones are printed."""
    common = {**weights_protocol(config, run_file), "environment": evaluation.environment()}
    results = [heldout_result(config, data, model, folder)]
    if config.eval.likelihood_images:
        results.append(likelihood_result(config, data, model))
    if config.eval.features is not None:
        results += sample_results(config, data, model, run_file, folder, hardware)
        floor = evaluation.floor_scores(data, num_samples=config.sampler.num_images, **feature_settings(config, hardware))
        results.append({"kind": "floor", **floor})
    for result in results:
        result["protocol"] = {**result["protocol"], **common}
    write_results(folder, results)
    print_results(results, folder)
    return results


def heldout(config: Config, data: ImageData, count: int) -> tuple[Tensor, Tensor | None]:
    """Returns the first held-out images in model units and their labels (None for an unconditional model)."""
    x = data.normalize(torch.from_numpy(data.test.images[:count].copy()))
    return x, torch.from_numpy(data.test.labels[:count].copy()) if config.data.num_classes else None


def heldout_result(config: Config, data: ImageData, model: Model, folder: Path) -> dict[str, Any]:
    """Weighted denoising loss on held-out images, on a grid of levels with the same noise for every model."""
    settings, objective = config.eval, model.objective
    x, labels = heldout(config, data, settings.loss_images)
    x, labels = x.to(model.device), None if labels is None else labels.to(model.device)
    grid = evaluation.loss_grid(objective.distribution, settings.loss_levels)

    def denoise(z: Tensor, sigma: float, y: Tensor | None) -> Tensor:
        return model.denoiser(y)(z, sigma)

    loss = evaluation.heldout_loss(
        denoise, x, labels, grid, sigma_data=objective.sigma_data, batch_size=config.sampler.batch_size, seed=settings.seed
    )
    owners = [objective.partition.block_of(level) for level in grid.levels]
    (folder / "plots").mkdir(exist_ok=True)
    path = folder / "plots" / "loss_by_level.png"
    plots.plot_loss_by_level({config.method.name: (grid.levels, loss)}, objective.partition.edges, path)
    return {
        "kind": "heldout_loss",
        "scores": evaluation.summarize_loss(loss, grid, owners),
        "by_level": {"levels": grid.levels.tolist(), "mass": grid.mass.tolist(), "loss": loss.tolist()},
        "protocol": {
            "metric": "EDM-weighted squared error, mean over dimensions and images",
            "images": len(x),
            "split": "test",
            "levels": settings.loss_levels,
            "seed": settings.seed,
        },
    }


def likelihood_result(config: Config, data: ImageData, model: Model) -> dict[str, Any]:
    """Log-likelihood of held-out images by the probability-flow ODE."""
    settings = config.eval
    x, labels = heldout(config, data, settings.likelihood_images)
    x, labels = x.to(model.device), None if labels is None else labels.to(model.device)
    schedule = sampler.model_schedule(model, dataclasses.replace(config.sampler, steps=settings.likelihood_steps))[::-1].copy()

    def denoise(z: Tensor, sigma: float, y: Tensor | None) -> Tensor:
        return model.denoiser(y)(z, sigma)

    found = evaluation.log_likelihood(denoise, x, labels, schedule, batch_size=config.sampler.batch_size)
    return {
        "kind": "likelihood",
        "scores": {"nats": float(found.nats.mean()), "bits_per_dimension": float(found.bits_per_dimension.mean())},
        "protocol": {**evaluation.LIKELIHOOD_PROTOCOL, "images": len(x), "split": "test", "steps": settings.likelihood_steps},
    }


def feature_settings(config: Config, hardware: Hardware) -> dict[str, Any]:
    """Returns the arguments that sample_scores and floor_scores share."""
    return {
        "split": config.eval.split,
        "features": config.eval.features,
        "inception_weights": config.eval.inception_weights,
        "batch_size": config.sampler.batch_size,
        "device": hardware.device,
        "seed": config.eval.seed,
    }


def sample_results(
    config: Config, data: ImageData, model: Model, run_file: dict[str, Any], folder: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """Scores of samples, one result per guidance scale, over eval.repeats sets of samples."""
    results = []
    for guidance in config.eval.guidance or [config.sampler.guidance]:
        sets = []
        for repeat in range(config.eval.repeats):
            settings = dataclasses.replace(config.sampler, guidance=guidance, seed=config.sampler.seed + repeat)
            path = sample(config, model, run_file, folder, settings)
            images, labels = sampler.load_arrays(path)
            scored = evaluation.sample_scores(images, labels if len(labels) else None, data, **feature_settings(config, hardware))
            sets.append({**scored, "images": str(path.parent.relative_to(folder))})
        names = [name for name in sets[0]["scores"] if all(one["scores"][name] is not None for one in sets)]
        results.append(
            {
                "kind": "samples",
                "scores": {name: evaluation.repeat_summary([one["scores"][name] for one in sets]) for name in names},
                "sets": [{"scores": one["scores"], "images": one["images"]} for one in sets],
                "protocol": {
                    **sets[0]["protocol"],
                    "sampler": dataclasses.asdict(dataclasses.replace(config.sampler, guidance=guidance)),
                    "visits": json.loads((folder / sets[0]["images"] / "protocol.json").read_text())["visits"],
                    "repeats": config.eval.repeats,
                },
            }
        )
    return results


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
    """Prints the main scores and where everything is."""
    for result in results:
        if result["kind"] == "heldout_loss":
            print(f"held-out loss {result['scores']['integrated']:.4f} on {result['protocol']['images']} images")
        elif result["kind"] == "samples":
            line = ", ".join(f"{name} {value['value']:.4g}" for name, value in result["scores"].items())
            print(f"samples at guidance {result['protocol']['sampler']['guidance']}: {line}")
            print(f"  pictures: {folder / result['sets'][0]['images'] / 'grid.png'}")
        else:
            line = ", ".join(f"{name} {value:.4g}" for name, value in result["scores"].items() if value is not None)
            print(f"{result['kind']}: {line}")
    print(f"scores: {folder / 'results.json'}\nplots:  {folder / 'plots'}")
