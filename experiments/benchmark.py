"""Measures what the project promises about speed and memory, on a machine on which nothing else runs.

    python -m experiments.benchmark                 # on two CPU cores about 6 minutes
    python -m experiments.benchmark training guidance    # some of the measurements

Ratios alone are judged: what is compared takes turns in one process, a first round warms up, and the ratio is the median over
the rounds. Rows go into experiments/records/benchmark.csv, a measurement at a time; one that is there for this commit, processor
and number of threads is not made again. They hold the load of the machine before the benchmark began.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import config as configuration
import generation
import hardware as machine
import main
import profiling
from config import Config, SettingError
from experiments import collect
from experiments.collect import read_rows, replace_rows, write_rows
from experiments.naive import naive_step
from hardware import Hardware
from kinds import build_model, build_module
from model import RoutedDenoiser, part_name
from profiling import ROUNDS, Job, interleaved, make_job, variant
from sampler import euler, image_noise, model_schedule

RECORDS = collect.RECORDS / "benchmark.csv"
COLUMNS = ("measurement", "name", "value", "bound", "passed", "note", "seconds")
COLUMNS += ("load", "hardware", "precision", "threads", "torch", "commit")
MANY = 5  # times as many rounds where a bound is within a few hundredths of 1, and where steps are small and vary
BUSY = 0.5  # a load average above which other processes disturb a measurement

# What is measured on: command-line settings. A shape of another kind of model is one more line here and in the bounds below.
SHAPES = {
    "dit_s2": ["data=cifar10", "model=dit_s2", "train.batch_size=16"],
    "digits": [],
    # The released ViT: 12 layers of width 128, an MLP of 3,072, dropout, 64 patches and the noisy label; end to end a plain ViT.
    "vit": ["scale=vit_digits", "data=cifar100", "data.crop=0", "model=vit_cifar100", "model.mlp_ratio=24"]
    + ["model.label_token=instead", "model.dropout=0.1", "train.batch_size=32"],
}
# Upper bounds of num_blocks x time of a block's step / time of the end-to-end step.
TRAINING = {
    "dit_s2": {2: 1.03, 3: 1.03, 4: 1.03, 6: 1.08},
    "digits": {2: 1.08, 3: 1.08, 4: 1.08},
    "vit": {3: 1.02},  # the released code's, as the next two
}
VIT_ACTIVATIONS = 0.357  # upper bound of a block's activations over those of the end-to-end step, 3 blocks
VIT_INFERENCE = 1.1  # upper bound of a prediction's time over that of the end-to-end network
# Lower bounds of (end-to-end time of sampling / block-wise time) / num_blocks, and the images that are sampled at once.
SAMPLING = {"dit_s2": (0.95, 8), "digits": (0.88, 64)}
SAMPLING_BLOCKS = (2, 3, 4)
SAMPLING_STEPS = 12  # a multiple of each of these
# Upper bounds of num_blocks x whole training state of a block's job / that of the end-to-end job: parameters, gradients,
# optimizer, EMA and activations.
STATE = {2: 1.05, 3: 1.05, 4: 1.05, 6: 1.09}
ACTIVATIONS = 1.02  # the same for activations, without those of embeddings and head
OUTSIDE = {"dit_s2": 0.05, "digits": 0.12}  # upper bounds of a step's share outside forward, backward and optimizer
NAIVE, BF16, COMPILED = 1.3, 1.8, 2.0  # lower bounds of ratios of time; the last two on a CPU with AMX


class Row(NamedTuple):
    """A measured number and its bound, `<= x` or `>= x`; none where there is nothing to hold.

    Attributes:
        precision: where it is not the machine's own.
    """

    name: str
    value: float
    bound: str = ""
    note: str = ""
    precision: str | None = None

    def cells(self) -> dict[str, str]:
        """Returns the row as text, with whether the number is within its bound: yes, no, or nothing without one."""
        passed = ""
        if self.bound:
            sign, limit = self.bound.split()
            passed = "yes" if (self.value <= float(limit) if sign == "<=" else self.value >= float(limit)) else "no"
        cells = {"name": self.name, "value": f"{self.value:.4f}", "bound": self.bound, "passed": passed, "note": self.note}
        return cells if self.precision is None else cells | {"precision": self.precision}


def settings(shape: str, *overrides: str) -> Config:
    """Returns a resolved configuration, composed as on the command line."""
    with initialize_config_dir(str(Path(main.__file__).resolve().parent / "configs"), version_base="1.3"):
        composed = compose("config", [*SHAPES[shape], *overrides])
    OmegaConf.resolve(composed)
    return configuration.resolve(OmegaConf.to_object(composed))


def jobs(config: Config, hardware: Hardware, blocks: Iterable[int]) -> dict[int, Job]:
    """Returns a block's job by number of blocks; 1 is end to end."""
    return {b: make_job(variant(config, b), hardware) for b in blocks}


def fp32(hardware: Hardware) -> Hardware:
    """Returns the same machine in float32."""
    return dataclasses.replace(hardware, precision="fp32")


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Returns the median over rounds of the ratio of two interleaved measurements."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def rounds(shape: str) -> int:
    """Returns the rounds of a measurement: small steps are cheap, and vary more."""
    return (MANY if shape == "digits" else 2) * ROUNDS


# ---------------------------------------------------------------------------------------------------------------------
# Measurements: each yields rows


def memory(hardware: Hardware) -> Iterator[Row]:
    """Activations and training state of a block's job at DiT-S/2, counted."""
    config = settings("dit_s2")
    counts = profiling.count(config, hardware)
    ends = counts.fixed[1] + config.train.batch_size * counts.activations[1]
    found = {}
    for blocks, job in jobs(config, hardware, (1, *STATE)).items():
        found[blocks] = sum(profiling.held_bytes(job).values()), profiling.activation_bytes(job)
    for blocks, bound in STATE.items():
        whole = blocks * sum(found[blocks]) / sum(found[1])
        note = f"{blocks * found[blocks][0] / found[1][0]:.4f} without activations"
        yield Row(f"state/dit_s2/{blocks}", whole, f"<= {bound}", note)
    for blocks in STATE:
        share = blocks * (found[blocks][1] - ends) / found[1][1]
        note = f"{found[blocks][1] / 2**20:.0f} of {found[1][1] / 2**20:.0f} MiB, {ends / 2**20:.0f} of it embeddings and head"
        yield Row(f"activations/dit_s2/{blocks}", share, f"<= {ACTIVATIONS}", note)
    kept = {b: profiling.activation_bytes(job) for b, job in jobs(settings("vit"), fp32(hardware), (1, 3)).items()}
    note = f"{kept[3] / 2**20:.0f} of {kept[1] / 2**20:.0f} MiB"
    yield Row("block_activations/vit/3", kept[3] / kept[1], f"<= {VIT_ACTIVATIONS}", note, "fp32")


def training(hardware: Hardware) -> Iterator[Row]:
    """num_blocks x time of a block's step over the time of the end-to-end step (appendix H)."""
    for shape, bounds in TRAINING.items():
        on = fp32(hardware) if shape == "vit" else hardware
        measured = jobs(settings(shape), on, (1, *bounds))
        seconds = interleaved({str(b): job.step for b, job in measured.items()}, hardware.device, MANY * ROUNDS)
        for blocks, bound in bounds.items():
            ratios = [blocks * a / b for a, b in zip(seconds[str(blocks)], seconds["1"], strict=True)]
            low, value, high = statistics.quantiles(ratios, n=4)
            note = f"{statistics.median(seconds[str(blocks)]):.4f} s a step, end to end {statistics.median(seconds['1']):.4f} s; "
            note += f"the middle half of the rounds {low:.3f} to {high:.3f}"
            yield Row(f"training/{shape}/{blocks}", value, f"<= {bound}", note, on.precision)


def sampling(hardware: Hardware) -> Iterator[Row]:
    """End-to-end time of sampling over the block-wise time, over num_blocks."""
    for shape, (bound, images) in SAMPLING.items():
        samplers = {}
        for blocks in (1, *SAMPLING_BLOCKS):
            config = variant(settings(shape, "sampler.schedule=per_block", f"sampler.steps={SAMPLING_STEPS}"), blocks)
            samplers[str(blocks)] = draw_images(build_model(config, modules_of(config, hardware), 1.0, hardware), images)
        seconds = interleaved(samplers, hardware.device, rounds(shape))
        for blocks in SAMPLING_BLOCKS:
            value = ratio(seconds["1"], seconds[str(blocks)]) / blocks
            yield Row(f"sampling/{shape}/{blocks}", value, f">= {bound}", f"{blocks * value:.2f} times as fast")


def inference(hardware: Hardware) -> Iterator[Row]:
    """Time of a prediction by 3 blocks, one step in each, over that of the end-to-end ViT."""
    predictions = {}
    for blocks in (1, 3):
        config = variant(settings("vit"), blocks)
        model = build_model(config, modules_of(config, hardware), 1.0, fp32(hardware))
        shape = config.train.batch_size, config.data.channels, config.data.size, config.data.size
        images = torch.randn(shape, device=hardware.device)
        predictions[str(blocks)] = functools.partial(model.stages, images)
    seconds = interleaved(predictions, hardware.device, rounds("vit"))
    note = f"{statistics.median(seconds['3']):.4f} s, end to end {statistics.median(seconds['1']):.4f} s"
    yield Row("inference/vit/3", ratio(seconds["3"], seconds["1"]), f"<= {VIT_INFERENCE}", note, "fp32")


def modules_of(config: Config, hardware: Hardware) -> dict[str, torch.nn.Module]:
    """Returns a model's modules as they are at the start, on the device."""
    names = [part_name(block) for block in range(configuration.trained_blocks(config))]
    return {name: build_module(config, name).to(hardware.device).eval() for name in names}


def draw_images(model: Any, images: int) -> Callable[[], torch.Tensor]:
    """Returns what samples some images of class 0."""
    noise = image_noise(0, range(images), model.shape, model.device)
    labels = torch.zeros(images, dtype=torch.int64, device=model.device)
    denoiser = model.denoiser(labels, model.config.sampler.guidance)
    schedule = model_schedule(model, model.config.sampler)
    return torch.inference_mode()(lambda: euler(denoiser, noise, schedule))


def guidance(hardware: Hardware) -> Iterator[Row]:
    """Guidance in two forward passes over guidance in one batched pass, 3 blocks."""
    for shape, (_, images) in SAMPLING.items():
        config = variant(settings(shape), 3)
        model = build_model(config, modules_of(config, hardware), 1.0, hardware)
        labels = torch.zeros(images, dtype=torch.int64, device=model.device)
        null = torch.full_like(labels, config.data.num_classes)
        z = torch.randn((images, *model.shape), device=model.device)
        batched = model.denoiser(labels, 1.5)
        alone = [RoutedDenoiser(model.objective, model.modules, y, [1.0] * 3, 0, model.autocast) for y in (labels, null)]

        def apart(alone: list[RoutedDenoiser] = alone, z: torch.Tensor = z) -> torch.Tensor:
            conditional, unconditional = (denoise(z, 80.0) for denoise in alone)
            return unconditional + 1.5 * (conditional - unconditional)

        def together(batched: RoutedDenoiser = batched, z: torch.Tensor = z) -> torch.Tensor:
            return batched(z, 80.0)

        with torch.inference_mode():
            seconds = interleaved({"apart": apart, "together": together}, hardware.device, rounds(shape))
        yield Row(f"guidance/{shape}/3", ratio(seconds["apart"], seconds["together"]), note=f"{images} images")


def outside(hardware: Hardware) -> Iterator[Row]:
    """Share of a step outside forward pass, backward pass and optimizer, 3 blocks."""
    for shape, bound in OUTSIDE.items():
        job = make_job(variant(settings(shape), 3), hardware)
        job.step()
        value = statistics.median(profiling.share_outside(job) for _ in range(rounds(shape)))
        yield Row(f"outside/{shape}/3", value, f"<= {bound}")


def has_amx(hardware: Hardware) -> bool:
    """Returns whether what is measured on is a CPU with AMX, for which there are bounds."""
    return hardware.device.type == "cpu" and torch.cpu._is_amx_tile_supported()


def precision(hardware: Hardware) -> Iterator[Row]:
    """Time of a step in float32 over that in bfloat16, 3 blocks."""
    amx = has_amx(hardware)
    for shape in SAMPLING:
        functions = {
            name: make_job(variant(settings(shape), 3), dataclasses.replace(hardware, precision=name)).step
            for name in ("fp32", "bf16")
        }
        seconds = interleaved(functions, hardware.device, rounds(shape))
        bound = f">= {BF16}" if amx and shape == "dit_s2" else ""
        yield Row(f"bf16_over_fp32/{shape}/3", ratio(seconds["fp32"], seconds["bf16"]), bound, "" if amx else "no AMX")


def compiled(hardware: Hardware) -> Iterator[Row]:
    """Time of an eager step in float32, and in the default precision, over that of the compiled step, at digits size."""
    if not machine.has_compiler(hardware.device):
        return
    amx = has_amx(hardware)
    config = variant(settings("digits"), 3)
    job = make_job(config, hardware)
    modules = {part_name(job.block): torch.compile(job.part.module, dynamic=False)}
    start = time.perf_counter()
    job.step(modules)
    warm_up = time.perf_counter() - start
    functions: dict[str, Callable[[], None]] = {
        "compiled": lambda: job.step(modules),
        "eager": make_job(config, hardware).step,
        "fp32": make_job(config, dataclasses.replace(hardware, precision="fp32")).step,
    }
    seconds = interleaved(functions, hardware.device, rounds("digits"))
    saved = statistics.median(seconds["eager"]) - statistics.median(seconds["compiled"])
    pays = f"it took {warm_up:.0f} s to compile, which {warm_up / saved:.0f} steps repay" if saved > 0 else "it does not pay"
    yield Row("compiled_over_eager/digits/3", ratio(seconds["eager"], seconds["compiled"]), note=pays)
    bound = f">= {COMPILED}" if amx else ""
    yield Row("compiled_over_fp32_eager/digits/3", ratio(seconds["fp32"], seconds["compiled"]), bound, "" if amx else "no AMX")


def naive(hardware: Hardware) -> Iterator[Row]:
    """Time of the naive loop's step (experiments/naive.py) over ours, with the same layers and precision, 3 blocks, on a CPU."""
    if hardware.device.type != "cpu":
        return
    config = variant(settings("digits"), 3)
    job = make_job(config, hardware)
    images = generation.stand_in(dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=90))).train
    step = naive_step(
        build_module(variant(config, 1), part_name(0)),
        images.images,
        images.labels,
        num_blocks=3,
        batch_size=config.train.batch_size,
        precision=hardware.precision,
    )
    seconds = interleaved({"naive": step, "ours": job.step}, hardware.device, rounds("digits"))
    yield Row("naive_over_ours/digits/3", ratio(seconds["naive"], seconds["ours"]), f">= {NAIVE}", "same layers and kernels")


MEASUREMENTS: dict[str, Callable[[Hardware], Iterator[Row]]] = {
    "memory": memory,
    "outside": outside,
    "naive": naive,
    "guidance": guidance,
    "training": training,
    "sampling": sampling,
    "inference": inference,
    "precision": precision,
    "compiled": compiled,
}


# ---------------------------------------------------------------------------------------------------------------------
# Records


def read_records() -> list[dict[str, str]]:
    """Returns the rows that are recorded."""
    return read_rows(RECORDS) if RECORDS.exists() else []


def add_records(new: list[dict[str, str]]) -> None:
    """Writes rows in place of those that the same hardware and threads gave before."""
    rows = read_records()
    replace_rows(rows, new, ("name", "hardware", "threads"))
    write_rows(RECORDS, rows, COLUMNS)


def run(names: list[str], device: str, threads: int | None) -> bool:
    """Makes the measurements that are not recorded yet, prints every row, and returns whether each is within its bound."""
    try:
        hardware = machine.set_up(device, "auto", threads)
    except SettingError as error:
        sys.exit(f"error: {error}")
    known = machine.environment()
    about = {
        "load": f"{os.getloadavg()[0]:.2f}",  # before this process adds its own
        "hardware": known["cpu"] if hardware.device.type == "cpu" else hardware.name,
        "precision": hardware.precision,
        "threads": str(hardware.threads),
        "torch": known["torch"],
        "commit": str(known["commit"]),
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if float(about["load"]) > BUSY:
        print(f"warning: the load is above {BUSY}: other processes disturb what is measured here", flush=True)
    rows = []
    for name in names:
        same = {"measurement": name, **{key: about[key] for key in ("hardware", "threads", "commit")}}
        found = [row for row in read_records() if all(row[key] == value for key, value in same.items())]
        if not found:
            start = time.perf_counter()
            measured = list(MEASUREMENTS[name](hardware))
            seconds = f"{time.perf_counter() - start:.0f}"
            found = [{"measurement": name, "seconds": seconds, **about, **row.cells()} for row in measured]
            add_records(found)
        for row in found:
            print(f"{row['name']:34} {row['value']:>8} {row['bound']:>8}  {row['passed']:4} {row['note']}", flush=True)
        rows += found
    return all(row["passed"] != "no" for row in rows)


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MEASUREMENTS)}; all by default")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda ...")
    parser.add_argument("--threads", type=int, help="PyTorch's choice by default")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - MEASUREMENTS.keys()
    if unknown:
        parser.error(f"there is no measurement {', '.join(sorted(unknown))}")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} must be at least 1")
    return arguments


if __name__ == "__main__":
    arguments = parse_arguments()
    passed = run(arguments.names or list(MEASUREMENTS), arguments.device, arguments.threads)
    print(f"recorded in {RECORDS}")
    sys.exit(not passed)
