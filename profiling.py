"""What a training step and a sample cost, and what fits into a memory.

mode=profile measures one block after the other, the deepest of each cut, on random data of the right shape: bytes, operations,
seconds. mode=plan predicts the same from counts of a network of one and of two layers.
"""

import csv
import dataclasses
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import checkpoint
import config as configuration
import plots
from checkpoint import Part
from config import Config, MethodConfig, PartitionConfig, SettingError, require
from data import Source
from hardware import Hardware
from kinds import KINDS, build_module, build_objective, trained_parts
from model import Draw, Objective, part_name, saved_bytes
from train import build_part, train_step
from vit import set_checkpointing

BLOCKS = (1, 2, 3, 4, 6)  # numbers of blocks that are compared; 1 is end to end
ROUNDS = 7  # of which the median is taken, after one that warms up
ALONE = {"blocks": "all", "offload": False, "parallel": None, "shard": False}  # settings of a job that is measured
TRAINING = {"mode": "train", "memory": None}
STEPS = 1000  # that a block is said to make in all; the learning rate alone depends on it


# ---------------------------------------------------------------------------------------------------------------------
# A block's job


def variant(config: Config, num_blocks: int, **train: Any) -> Config:
    """Returns the configuration cut into another number of blocks, 1 for end to end, with other settings of `train`.

    Levels play no part in what a step costs, so a custom cut is replaced by equal probability.
    """
    method = MethodConfig("end_to_end" if num_blocks == 1 else "diffusion_blocks")
    cut = PartitionConfig("equi_probability", num_blocks)
    if num_blocks == config.partition.num_blocks and config.method == method:
        cut = config.partition  # with its own layers per block
    settings = dataclasses.replace(config.train, **{**ALONE, **train})
    return configuration.resolve(dataclasses.replace(config, method=method, partition=cut, train=settings, **TRAINING))


def uncut(config: Config, depth: int, batch_size: int) -> Config:
    """Returns the configuration of one network of so many layers, of the kind that the configuration's blocks are."""
    model, cut = dataclasses.replace(config.model, depth=depth), PartitionConfig("equi_probability", 1)
    settings = dataclasses.replace(config.train, **ALONE, batch_size=batch_size, micro_batch=None)
    return configuration.resolve(dataclasses.replace(config, model=model, partition=cut, train=settings, **TRAINING))


@dataclass
class Job:
    """One block in training.

    Attributes:
        parts: that its steps train by name, its own first.
    """

    config: Config
    hardware: Hardware
    objective: Objective
    source: Source
    parts: dict[str, Part]
    block: int

    @property
    def part(self) -> Part:
        return self.parts[part_name(self.block)]

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: part.module for name, part in self.parts.items()}

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    @property
    def layers(self) -> int:
        return configuration.layer_split(self.config)[self.block]

    def loss(self) -> Tensor:
        """Returns the loss of one step's micro-batch, ready for the backward pass."""
        settings = self.config.train
        rows = slice(0, settings.micro_batch or settings.batch_size)
        draw = Draw(self.block, 0, settings.batch_size, rows)
        batch = self.source.batch(draw.block, draw.step, draw.batch_size, rows)
        return self.objective.training_loss(self.modules, batch, draw, self.hardware.autocast()).sum()

    def set_checkpointing(self, checkpointing: bool) -> None:
        for module in self.modules.values():
            set_checkpointing(module, checkpointing)

    def step(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        """Makes one step of training.

        Args:
            modules: what stands for parts' modules, by part name.
        """
        modules, parts = self.modules | dict(modules or {}), list(self.parts.values())
        train_step(self.config.train, self.objective, self.source, modules, parts, self.block, STEPS, self.hardware)


def make_job(config: Config, hardware: Hardware, block: int | None = None) -> Job:
    """Returns the job of one of a configuration's blocks; None: the deepest."""
    kind, layers = KINDS[config.model.name], configuration.layer_split(config)
    block = layers.index(max(layers)) if block is None else block
    parts = {name: build_part(config, name, hardware.device) for name in trained_parts(config, block)}
    source = kind.source(config, kind.stand_in(config), hardware.device)
    return Job(config, hardware, build_objective(config), source, parts, block)


# ---------------------------------------------------------------------------------------------------------------------
# Seconds


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has finished already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds that were spent in some functions; what one of them calls is counted with it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.running = device, 0.0, False

    def timed(self, function: Callable) -> Callable:
        """Returns the function with its time taken."""

        def run(*arguments: Any, **named: Any) -> Any:
            if self.running:
                return function(*arguments, **named)
            synchronize(self.device)
            start, self.running = time.perf_counter(), True
            result = function(*arguments, **named)
            synchronize(self.device)
            self.seconds, self.running = self.seconds + time.perf_counter() - start, False
            return result

        return run


def interleaved(functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds of each function in each round, the functions taking turns; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            watch = Stopwatch(device)
            watch.timed(function)()
            if round_ > 0:
                seconds[name].append(watch.seconds)
    return seconds


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def share_outside(job: Job) -> float:
    """Makes one step and returns the share of its time that is not networks' forward pass, backward or optimizer."""
    whole, inside = Stopwatch(job.hardware.device), Stopwatch(job.hardware.device)
    with (
        replaced(torch.Tensor, "backward", inside.timed(torch.Tensor.backward)),
        replaced(torch.optim.AdamW, "step", inside.timed(torch.optim.AdamW.step)),
        replaced(nn.Module, "__call__", inside.timed(nn.Module.__call__)),
    ):
        whole.timed(job.step)()
    return 1 - inside.seconds / whole.seconds


# ---------------------------------------------------------------------------------------------------------------------
# Bytes and operations


def activation_bytes(job: Job) -> int:
    """Returns what a step keeps between its forward and its backward pass."""
    return saved_bytes(job.loss, [*job.parameters, *(buffer for module in job.modules.values() for buffer in module.buffers())])


def held_bytes(job: Job) -> dict[str, int]:
    """Makes one step and returns the bytes of what its parts hold while their optimizers work, each storage once."""
    found: Counter[str] = Counter()

    def look(part: Part, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = list(part.module.parameters())
        held = {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": [value for state in optimizer.state.values() for value in state.values()],
            "ema": part.ema.values(),
        }
        for name, tensors in held.items():
            storages = [tensor.untyped_storage() for tensor in tensors]
            found[name] += sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    hooks = [part.optimizer.register_step_post_hook(partial(look, part)) for part in job.parts.values()]
    job.step()
    for hook in hooks:
        hook.remove()
    return dict(found)


def operations(job: Job) -> int:
    """Returns the floating-point operations of a micro-batch's forward and backward pass, of matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        job.loss().backward()
    for part in job.parts.values():
        part.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops()


@dataclass(frozen=True)
class Counts:
    """What layers and ends (embeddings and head) cost: pairs of (one layer, both ends).

    Attributes:
        parameters: numbers.
        fixed: bytes kept for the backward pass whatever the batch: copies of weights in another precision.
        activations: bytes kept per sample.
        inputs_fixed, inputs: the same with checkpointing, but for the layer that is computed again.
        operations: per sample, of the forward and the backward pass.
        again: of these, what checkpointing computes a second time.
    """

    parameters: tuple[int, int]
    fixed: tuple[int, int]
    activations: tuple[int, int]
    inputs_fixed: tuple[int, int]
    inputs: tuple[int, int]
    operations: tuple[int, int]
    again: tuple[int, int]


@dataclass(frozen=True)
class Costs:
    """What predictions are made from: counts, and the operations per second of a training step on this machine."""

    counts: Counts
    rate: float


def layer_and_ends(one: int, two: int) -> tuple[int, int]:
    """Splits what networks of one and two layers cost into one layer and the rest."""
    return two - one, 2 * one - two


def count(config: Config, hardware: Hardware) -> Counts:
    """Counts on networks of one and two layers of the kind that a cut has, for one sample and for two."""
    found: dict[str, list[int]] = {field.name: [] for field in dataclasses.fields(Counts)}
    for depth in (1, 2):
        shallow = [make_job(uncut(config, depth, batch_size), hardware) for batch_size in (1, 2)]
        found["parameters"].append(sum(parameter.numel() for parameter in shallow[0].parameters))
        for checkpointing, fixed, each in ((False, "fixed", "activations"), (True, "inputs_fixed", "inputs")):
            for job in shallow:
                job.set_checkpointing(checkpointing)
            one, two = (activation_bytes(job) for job in shallow)
            found[fixed].append(2 * one - two)
            found[each].append(two - one)
            found["again" if checkpointing else "operations"].append(operations(shallow[0]))
        found["again"][-1] -= found["operations"][-1]
    return Counts(**{name: layer_and_ends(*values) for name, values in found.items()})


def predicted_state(counts: Counts, layers: int) -> int:
    """Returns the bytes of a block's parameters, gradients, two moments of AdamW and EMA."""
    return 20 * (layers * counts.parameters[0] + counts.parameters[1])


def predicted_activations(counts: Counts, layers: int, samples: int, checkpointing: bool) -> int:
    """Returns the bytes kept for the backward pass; with checkpointing, layers' inputs and one layer that is computed again."""
    layer, ends = (fixed + samples * each for fixed, each in zip(counts.fixed, counts.activations, strict=True))
    if not checkpointing:
        return layers * layer + ends
    kept, ends = (fixed + samples * each for fixed, each in zip(counts.inputs_fixed, counts.inputs, strict=True))
    return layers * kept + layer + ends


def predicted_operations(counts: Counts, layers: int, samples: int, checkpointing: bool) -> int:
    """Returns the operations of a step."""
    layer, ends = counts.operations
    if checkpointing:
        layer, ends = layer + counts.again[0], ends + counts.again[1]
    return samples * (layers * layer + ends)


# ---------------------------------------------------------------------------------------------------------------------
# mode=profile


def cuts(config: Config) -> list[int]:
    """Returns the numbers of blocks to compare: BLOCKS and the configuration's own, as far as there are layers for them."""
    if config.objective.name == "next_token":
        return [1]
    return [b for b in sorted({*BLOCKS, config.partition.num_blocks}) if b <= config.model.depth]


def check_room(config: Config, counts: Counts, hardware: Hardware) -> None:
    """Refuses what the device has no room for: end to end, the largest of the jobs, is measured too.

    Raises:
        SettingError: names a micro-batch that fits, where there is one.
    """
    free = hardware.free_memory()
    depth, asked = config.model.depth, config.train.micro_batch or config.train.batch_size
    sizes = [size for size in micro_batches(config.train.batch_size) if size <= asked]
    needed = {n: predicted_state(counts, depth) + predicted_activations(counts, depth, n, False) for n in (asked, *sizes)}
    if free is None or needed[asked] <= free:
        return
    fitting = next((f"set train.micro_batch={n}" for n in sizes if needed[n] <= free), "take a smaller model, or mode=plan")
    raise SettingError(
        f"mode=profile measures end to end too, which needs {mebi(needed[asked])} MiB for {asked} samples at once, and there "
        f"are {mebi(free)} on {hardware.device}: {fitting}"
    )


def measure(job: Job, costs: Costs, checkpointing: bool) -> dict[str, Any]:
    """Returns a row of the profile, but for sampling: one block, with or without checkpointing."""
    settings, device, counts = job.config.train, job.hardware.device, costs.counts
    job.set_checkpointing(checkpointing)
    samples = settings.micro_batch or settings.batch_size
    blocks = configuration.trained_blocks(job.config)
    layer = counts.fixed[0] + samples * counts.activations[0]
    activations = activation_bytes(job) + (layer if checkpointing else 0)
    number_of_operations = operations(job) * math.ceil(settings.batch_size / samples)
    held = held_bytes(job)
    peak = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job.step()
        peak = torch.cuda.max_memory_allocated(device)
        activations = peak - before - held["gradients"]  # which are the rest of what a step adds
    seconds = statistics.median(interleaved({"step": job.step}, device)["step"])
    step_operations = predicted_operations(counts, job.layers, settings.batch_size, checkpointing)
    return {
        "num_blocks": blocks,
        "checkpointing": checkpointing,
        "layers": job.layers,
        **{f"{name}_bytes": size for name, size in held.items()},
        "activations_bytes": activations,
        "ends_parameters_bytes": 4 * counts.parameters[1],
        "ends_activations_bytes": counts.fixed[1] + samples * counts.activations[1],
        "formula_bytes": (4 * 4 * counts.parameters[0] + layer) * job.layers,
        "predicted_state_bytes": predicted_state(counts, job.layers),
        "predicted_activations_bytes": predicted_activations(counts, job.layers, samples, checkpointing),
        "peak_bytes": peak,
        "operations": number_of_operations,
        "predicted_operations": step_operations,
        "step_seconds": seconds,
        "predicted_seconds": step_operations / costs.rate,
        "outside_share": statistics.median(share_outside(job) for _ in range(ROUNDS)),
        "all_blocks_seconds": blocks * seconds,
    }


def sample_seconds(job: Job) -> float:
    """Returns the seconds per sample: those of one evaluation of the network, as sampling makes it, times their number."""
    kind, device = KINDS[job.config.model.name], job.hardware.device
    job.set_checkpointing(False)
    evaluate, evaluations = kind.one_evaluation(job.config, job.block, job.modules, job.hardware)
    once = statistics.median(interleaved({"once": evaluate}, device)["once"])
    return evaluations * once / job.config.train.batch_size


def calibrate(config: Config, hardware: Hardware, counts: Counts) -> float:
    """Returns the operations per second of a step of a network of three layers, on a batch of half a GiB at most."""
    most = max(2**29 // predicted_activations(counts, 3, 1, False), 1)
    samples = min(config.train.micro_batch or config.train.batch_size, most)
    job = make_job(uncut(config, min(config.model.depth, 3), samples), hardware)
    seconds = statistics.median(interleaved({"step": job.step}, hardware.device)["step"])
    return predicted_operations(counts, job.layers, samples, False) / seconds


def cost(config: Config, hardware: Hardware) -> dict[int, Costs]:
    """Returns what predictions are made from, by number of blocks; where end to end has layers of another kind, twice."""
    found: dict[str, Costs] = {}
    result = {}
    for num_blocks in cuts(config):
        cut = variant(config, num_blocks)
        method = uncut(cut, 1, 1).method.name
        if method not in found:
            counts = count(cut, hardware)
            found[method] = Costs(counts, calibrate(cut, hardware, counts))
        result[num_blocks] = found[method]
    return result


def counts_of(costs: Mapping[int, Costs]) -> dict[int, dict[str, Any]]:
    """Returns the counts by number of blocks, as plain values."""
    return {num_blocks: dataclasses.asdict(found.counts) for num_blocks, found in costs.items()}


def profile(config: Config, hardware: Hardware, folder: Path) -> None:
    """Measures end-to-end training and 2, 3, 4 and 6 blocks; prints the tables and writes profile.json, .csv and .png."""
    costs = cost(config, hardware)
    check_room(config, costs[1].counts, hardware)
    rows = []
    for num_blocks in cuts(config):
        job = make_job(variant(config, num_blocks), hardware)
        pair = [measure(job, costs[num_blocks], checkpointing) for checkpointing in (False, True)]
        sampling = sample_seconds(job)  # which keeps nothing for a backward pass
        rows += [{**row, "sample_seconds": sampling} for row in pair]
        del job  # before the next one is built
    for row in rows:
        end_to_end = next(r for r in rows if r["num_blocks"] == 1 and r["checkpointing"] == row["checkpointing"])
        row["relative_step"] = row["all_blocks_seconds"] / end_to_end["all_blocks_seconds"]
        row["relative_speed"] = end_to_end["sample_seconds"] / row["sample_seconds"]
    about = {
        "model": dataclasses.asdict(config.model),
        "batch_size": config.train.batch_size,
        "micro_batch": config.train.micro_batch,
        "hardware": dataclasses.asdict(hardware) | {"device": hardware.name},
        "sampler": dataclasses.asdict(config.sampler),
        "counts": counts_of(costs),
    }
    with checkpoint.locked(folder):
        write(folder, "profile", {**about, "rows": rows}, rows)
        plots.plot_profile(rows, folder / "profile.png")
    print_profile(rows)
    print(f"profile: {folder / 'profile.json'}, profile.csv, profile.png")


def print_profile(rows: list[dict[str, Any]]) -> None:
    """Prints the profile as two tables: memory, and the paper's appendix H with the relative speed."""
    print("\nMemory of one block's job in MiB; (4P + A)L/B is the method's own count, without EMA, embeddings and head")
    head = (
        "blocks",
        "checkp.",
        "params",
        "grads",
        "optim.",
        "EMA",
        "activ.",
        "sum",
        "predicted",
        "(4P + A)L/B",
        "ends' par.",
        "ends' act.",
    )
    cells = [
        [
            row["num_blocks"],
            "yes" if row["checkpointing"] else "no",
            *(mebi(row[f"{name}_bytes"]) for name in ("parameters", "gradients", "optimizer", "ema", "activations")),
            mebi(total_bytes(row)),
            mebi(row["predicted_state_bytes"] + row["predicted_activations_bytes"]),
            "" if row["checkpointing"] else mebi(row["formula_bytes"]),
            mebi(row["ends_parameters_bytes"]),
            mebi(row["ends_activations_bytes"]),
        ]
        for row in rows
    ]
    print_table(head, cells)
    print("\nTime as in appendix H: a block's step, times the number of blocks, against end to end; a sample, and its speed")
    head = ("blocks", "checkp.", "GFLOP", "s/step", "predicted", "outside", "times blocks", "relative", "s/sample", "speed")
    cells = [
        [
            row["num_blocks"],
            "yes" if row["checkpointing"] else "no",
            f"{row['operations'] / 1e9:.4g}",
            f"{row['step_seconds']:.4f}",
            f"{row['predicted_seconds']:.4f}",
            f"{row['outside_share']:.1%}",
            f"{row['all_blocks_seconds']:.4f}",
            f"{row['relative_step']:.3f}",
            f"{row['sample_seconds']:.4g}",
            f"{row['relative_speed']:.2f}",
        ]
        for row in rows
    ]
    print_table(head, cells)


def total_bytes(row: Mapping[str, Any]) -> int:
    """Returns what one block's job holds at its peak."""
    return sum(row[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "ema", "activations"))


def mebi(value: float) -> str:
    """Returns bytes as MiB."""
    return f"{value / 2**20:.1f}"


def print_table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Prints right-aligned columns."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def write(folder: Path, name: str, whole: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes a result as JSON and its rows as CSV."""
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------------------------------------
# mode=plan

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Returns the bytes of a text such as 8GiB.

    Raises:
        SettingError: not a number with a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    size = float(found[1]) * UNITS.get(found[2].upper(), 0) if found is not None else 0
    require(0 < size < math.inf, f"memory={text} is not a size: write a number and a unit, such as memory=8GiB")
    return int(size)


def micro_batches(batch_size: int) -> list[int]:
    """Returns sizes of micro-batches, the whole batch first, each half of the one before, rounded up."""
    sizes = [batch_size]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def plan_row(config: Config, costs: Costs, memory: int, checkpointing: bool, offload: bool) -> dict[str, Any]:
    """Returns what the largest micro-batch that fits needs; where none fits, what the smallest would need.

    On the device are 16 bytes per parameter (the parameter, two moments, EMA) of every block, or with offload of one, 4 more
    for the gradients of the block in training, and its activations. What blocks share is there once, and stays.
    """
    settings, counts = config.train, costs.counts
    blocks = configuration.trained_blocks(config)
    layers = configuration.layer_split(config)
    shared = sum(p.numel() for name in trained_parts(config, 0)[1:] for p in build_module(config, name).parameters())
    parameters = [own * counts.parameters[0] + counts.parameters[1] - shared for own in layers]
    others = 0 if offload else 16 * (sum(parameters) - max(parameters))
    state = predicted_state(counts, max(layers)) + others
    for micro_batch in micro_batches(settings.batch_size):
        needed = state + predicted_activations(counts, max(layers), micro_batch, checkpointing)
        if needed <= memory:
            break
    seconds = predicted_operations(counts, max(layers), settings.batch_size, checkpointing) / costs.rate
    return {
        "num_blocks": blocks,
        "checkpointing": checkpointing,
        "offload": offload,
        "micro_batch": micro_batch,
        "bytes": needed,
        "fits": needed <= memory,
        "transfer_bytes": 2 * 16 * max(parameters) if offload else 0,
        "step_seconds": seconds,
        "all_blocks_seconds": blocks * seconds,
    }


def plan(config: Config, hardware: Hardware, folder: Path) -> None:
    """Prints and saves which cuts, micro-batches, checkpointing and offload fit a memory, the fastest first.

    Raises:
        SettingError: none does.
    """
    memory = parse_bytes(config.memory)
    costs = cost(config, hardware)
    rows = [
        plan_row(variant(config, num_blocks), costs[num_blocks], memory, checkpointing, offload)
        for num_blocks in cuts(config)
        for checkpointing in (False, True)
        for offload in ((False, True) if num_blocks > 1 else (False,))
    ]
    least = min(rows, key=lambda row: row["bytes"])
    if not any(row["fits"] for row in rows):
        ways = {"train.activation_checkpointing=true": least["checkpointing"], "train.offload=true": least["offload"]}
        raise SettingError(
            f"memory={config.memory} holds no cut of this model: the smallest needs {mebi(least['bytes'])} MiB, with "
            + " ".join([f"partition.num_blocks={least['num_blocks']}", "train.micro_batch=1", *(w for w in ways if ways[w])])
        )
    rows.sort(key=lambda row: (not row["fits"], row["all_blocks_seconds"], row["bytes"]))
    with checkpoint.locked(folder):
        write(folder, "plan", {"memory": memory, "rows": rows, "counts": counts_of(costs)}, rows)
    print(f"\nWhat fits {config.memory}, for a batch of {config.train.batch_size} in {hardware.precision}; a job of one block")
    print("(train.blocks=[b]) needs what offload needs. Times from the rate measured on this machine, without transfers.")
    head = ("blocks", "micro-batch", "checkp.", "offload", "MiB", "s/step", "times blocks", "MiB per change of block")
    cells = [
        [
            row["num_blocks"],
            row["micro_batch"],
            "yes" if row["checkpointing"] else "no",
            "yes" if row["offload"] else "no",
            mebi(row["bytes"]),
            f"{row['step_seconds']:.4g}",
            f"{row['all_blocks_seconds']:.4g}",
            mebi(row["transfer_bytes"]) if row["offload"] else "",
        ]
        for row in rows
        if row["fits"]
    ]
    print_table(head, cells)
    print(f"plan: {folder / 'plan.json'}, plan.csv")
