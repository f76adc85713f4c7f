"""The training loop: one block per step.

A block's steps do not depend on when other blocks make theirs: rate, EMA and everything drawn follow the block's own count. So
the order of the steps is a matter of taste, a job may train some blocks alone, and a resumed run is the same run.
"""

import functools
import json
import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import checkpoint
import config as configuration
import parallel
import plots
from checkpoint import Part
from config import Config, SettingError, TrainConfig, require
from convert import starting_weights
from data import Source
from hardware import Hardware, has_compiler
from kinds import build_module, trained_parts
from model import Draw, Objective, OneResident, part_name
from parallel import ALONE, World
from randomness import stream_seed
from vit import set_checkpointing


class NonFiniteLoss(RuntimeError):
    """A loss or gradient that is not a number or infinite; the message names block and step."""


class Stopped(SystemExit):
    """A signal ended the training; the checkpoint is written."""


# ---------------------------------------------------------------------------------------------------------------------
# Which block, when: pure functions of the settings


def update_counts(seed: int, order: str, probabilities: list[float], total: int) -> list[int]:
    """Returns how many of `total` steps each block gets.

    For `uniform` order the steps are independent draws; otherwise the counts are in proportion, by largest remainder, and at
    least 1.
    """
    if order == "uniform":
        return np.bincount(_draws(seed, probabilities, total), minlength=len(probabilities)).tolist()
    shares = np.array(probabilities) * total / sum(probabilities)
    counts = np.maximum(np.floor(shares), 1).astype(int)
    while (missing := total - counts.sum()) != 0:
        block = np.argmax((shares - counts) * np.sign(missing) + np.where((missing < 0) & (counts == 1), -np.inf, 0))
        counts[block] += np.sign(missing)
    return counts.tolist()


def _draws(seed: int, probabilities: list[float], total: int) -> np.ndarray:
    edges = np.cumsum(probabilities) / sum(probabilities)
    uniform = np.random.Generator(np.random.Philox(stream_seed(seed, "blocks"))).random(total)
    return np.minimum(np.searchsorted(edges, uniform, side="right"), len(probabilities) - 1)


def update_order(seed: int, order: str, probabilities: list[float], total: int) -> np.ndarray:
    """Returns the block of each of `total` steps, (total,) int64.

    Args:
        order: `shuffled`: rounds in random order (with unequal probabilities, the k-th of n steps of a block falls at a random
            time of the k-th n-th of the run); `sequential`: all steps of block 0, then of block 1 ...; `uniform`: independent
            draws, as in the paper.
    """
    if order == "uniform":
        return _draws(seed, probabilities, total)
    counts = update_counts(seed, order, probabilities, total)
    blocks = np.repeat(np.arange(len(counts)), counts)
    if order == "sequential":
        return blocks
    times = []
    for block, count in enumerate(counts):
        uniform = np.random.Generator(np.random.Philox(stream_seed(seed, "block_order", block))).random(count)
        times.append((np.arange(count) + uniform) / count)
    return blocks[np.argsort(np.concatenate(times), kind="stable")]


def in_runs(order: np.ndarray, length: int) -> np.ndarray:
    """Returns the same steps with each block's in runs of `length`; a run stands where its first step stood, (total,) int64."""
    made: dict[int, int] = defaultdict(int)
    first: dict[tuple[int, int], int] = {}
    positions = []
    for position, block in enumerate(order.tolist()):
        positions.append(first.setdefault((block, made[block] // length), position))
        made[block] += 1
    return order[np.argsort(positions, kind="stable")]


def block_shares(config: Config, objective: Objective) -> list[float]:
    """Returns each block's share of the steps: equal, or in proportion to its mass under the training distribution."""
    if config.train.block_probability == "mass":
        return objective.partition.masses(objective.distribution)
    blocks = configuration.trained_blocks(config)
    return [1 / blocks] * blocks


def steps_per_block(config: Config, objective: Objective) -> list[int]:
    """Returns how many steps each block makes in the whole run."""
    shares = block_shares(config, objective)
    return update_counts(config.seed, config.train.block_order, shares, configuration.total_steps(config))


def learning_rate(settings: TrainConfig, step: int, steps: int) -> float:
    """Returns the rate of step `step` (from 0) of a block that makes `steps`: linear warm-up, then constant or cosine to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1)
    return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def ema_decay(settings: TrainConfig, step: int) -> float:
    """Returns EDM's EMA decay: half-life min(half_life, rampup * images seen), in images of this block's own steps."""
    half_life = float(settings.ema_half_life)
    if settings.ema_rampup is not None:
        half_life = min(half_life, settings.ema_rampup * step * settings.batch_size)
    return 0.5 ** (settings.batch_size / half_life) if half_life > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# A part and its step


def check(config: Config, hardware: Hardware) -> None:
    """Refuses what this machine, or this kind of model, cannot do.

    Raises:
        SettingError: offload without a device, compilation without a compiler, checkpointing of a model that has none.
    """
    settings = config.train
    require(
        not settings.offload or hardware.device.type != "cpu",
        "train.offload=true moves blocks between a device and the host, and this run computes on the CPU: leave it out",
    )
    require(
        not settings.compile or has_compiler(hardware.device),
        f"train.compile=true finds no compiler for {hardware.device} (g++ or CXX for a CPU, Triton for a GPU): leave it out",
    )
    if settings.activation_checkpointing:
        with torch.device("meta"):
            module = build_module(config, trained_parts(config, configuration.owned_blocks(config)[0])[0])
        require(
            set_checkpointing(module, True),
            f"train.activation_checkpointing=true keeps inputs of layers, which model={config.model.name} has not: leave it out",
        )


def build_part(config: Config, name: str, device: torch.device, world: World = ALONE) -> Part:
    """Returns a part at its start, with gradients, EMA and optimizer of its own."""
    module, settings = build_module(config, name), config.train
    if settings.shard:
        parallel.shard(module, world, device)
    module.to(device)
    set_checkpointing(module, settings.activation_checkpointing)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    return Part(module, {name: value.detach().clone() for name, value in module.named_parameters()}, optimizer)


def begin_from(config: Config, parts: Mapping[str, Part]) -> None:
    """Loads the weights that `train.init_from` begins with into parts and their EMA.

    Raises:
        SettingError: no checkpoint there, one of several blocks, or one of other shapes.
    """
    folder = Path(config.train.init_from)
    run = checkpoint.read_run(folder)
    require(run is not None, f"train.init_from={folder} holds no checkpoint")
    blocks = run["identity"]["method"]["name"] == "diffusion_blocks"
    require(not blocks, f"train.init_from={folder} holds blocks; one network over all levels is needed")
    weights = checkpoint.load_weights(folder, run, part_name(0), "ema")
    starts = starting_weights(weights, config.train.init_layers, configuration.layer_split(config))
    for block, start in enumerate(starts):
        if part_name(block) in parts:
            part = parts[part_name(block)]
            try:
                part.module.load_state_dict(start)
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise SettingError(f"train.init_from={folder} does not fit this model: {reason}") from None
            for name, value in part.module.named_parameters():
                part.ema[name].copy_(value.detach())


def place(part: Part, device: torch.device) -> None:
    """Moves all that a part holds between two steps; what comes from a GPU to the host is pinned there."""

    def moved(value: Tensor) -> Tensor:
        if value.device.type == "cuda" and device.type == "cpu":
            return torch.empty_like(value, device=device, pin_memory=True).copy_(value, non_blocking=True)
        return value.to(device, non_blocking=True)

    for tensor in (*part.module.parameters(), *part.module.buffers()):
        tensor.data = moved(tensor.data)
    part.ema.update({name: moved(value) for name, value in part.ema.items()})
    for state in part.optimizer.state.values():
        state.update({key: moved(value) for key, value in state.items()})


def make_resident(parts: Mapping[str, Part], names: Sequence[str], device: torch.device) -> None:
    """Leaves these parts alone on the device, the others on the host."""
    for name, part in parts.items():
        if name not in names:
            place(part, torch.device("cpu"))
    for name in names:
        place(parts[name], device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the host may read what came to it, for a checkpoint


def clip_gradients(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scales gradients so that their norm is at most `limit`, and returns what it was."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    whole = parallel.whole(norm)
    # On a CPU the norm is there, and most steps need no scaling; to look at it on a GPU would mean to wait. 1e-6 is torch's own.
    if whole.device.type != "cpu" or not whole + 1e-6 <= limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return whole


def train_step(
    settings: TrainConfig,
    objective: Objective,
    source: Source,
    modules: Mapping[str, nn.Module],
    trained: Sequence[Part],
    block: int,
    steps: int,
    hardware: Hardware,
    world: World = ALONE,
) -> Tensor:
    """One optimizer step of one block; nothing but the parts that it trains moves.

    Args:
        modules: every part's module by name, or its compiled form.
        trained: the parts that this block's steps train, its own first: that one's count names what is drawn.
        steps: that the block makes in all.
        world: the processes that share the block; each takes its rows of the batch.

    Returns:
        The mean loss of the batch, on the device; not finite where a gradient is not.
    """
    started = time.perf_counter()
    step, size = trained[0].step, settings.batch_size
    rows = world.rows(size)
    micro = settings.micro_batch or size
    total = torch.zeros((), device=hardware.device)
    for start in range(rows.start, rows.stop, micro):
        draw = Draw(block, step, size, slice(start, min(start + micro, rows.stop)))
        batch = source.batch(draw.block, draw.step, draw.batch_size, draw.rows)
        with parallel.travelling(modules.values(), last=draw.rows.stop == rows.stop):
            loss = objective.training_loss(modules, batch, draw, hardware.autocast()).sum() / size
            (loss * world.size).backward()  # gradients are averaged over the processes
        total += loss.detach()
    for part in trained:
        (group,) = part.optimizer.param_groups
        norm = clip_gradients(group["params"], math.inf if settings.clip_norm is None else settings.clip_norm)
        # A bad gradient stops the run as a bad loss does, and as late: without waiting for the device.
        total += 0 * norm
        group["lr"] = learning_rate(settings, step, steps)
        part.optimizer.step()
        part.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(part.ema.values()), group["params"], 1 - ema_decay(settings, part.step))
        part.step += 1
    trained[0].seconds += time.perf_counter() - started
    return world.add(total)


# ---------------------------------------------------------------------------------------------------------------------
# The run


class Metrics:
    """metrics.jsonl: a row per block and interval, with the mean loss since its last row.

    Reading a loss waits for the device, so it happens here and nowhere else in the loop.
    """

    def __init__(self, path: Path, steps: dict[int, int], on_row: Callable[[dict[str, Any]], None], keep: bool = True) -> None:
        """Cuts an existing file back to the checkpoint, whose parts have made these steps.

        Args:
            keep: whether rows are written; of several processes, which have the same losses, one does.
        """
        self.path, self.on_row, self.keep = path, on_row, keep
        self.pending: dict[int, list[Tensor]] = defaultdict(list)
        if not keep:
            return
        rows = [row for row in read_metrics(path) if row["step"] <= steps.get(row["block"], 0)]
        checkpoint.write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))

    def add(self, block: int, loss: Tensor) -> None:
        self.pending[block].append(loss)

    def write(self, block: int, step: int, **values: float) -> float | None:
        """Writes the row of a block's steps up to `step` and returns its loss; None where there is nothing new.

        Raises:
            NonFiniteLoss: names block and step.
        """
        losses = torch.stack(self.pending[block]).tolist() if self.pending[block] else []
        self.pending[block].clear()
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                at = step - len(losses) + index + 1
                raise NonFiniteLoss(
                    f"the loss of block {block} or its gradient is not finite at its step {at}; the last good checkpoint is kept"
                )
        if not losses:
            return None
        row = {"block": block, "step": step, "loss": sum(losses) / len(losses), **values}
        if self.keep:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
            self.on_row(row)
        return row["loss"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a metrics.jsonl; a last line that was cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT (Ctrl-C) instead of dying of them, so that a checkpoint can be written; a second one kills."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals reach the main thread alone
        return

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        restore()


def describe(
    config: Config, fingerprint: str, scale: float, hardware: Hardware, versions: dict[str, Any], processes: int = 1
) -> dict[str, Any]:
    """Returns what a checkpoint says of itself beside its parts: settings, data and machine; merge and resume compare these."""
    return {
        "identity": configuration.trained_identity(config),
        "data": {"fingerprint": fingerprint, "scale": scale},
        "commit": versions["commit"],
        "machine": {
            "precision": hardware.precision,
            "device": hardware.name,
            "threads": hardware.threads,
            "processes": processes,  # that share a block
            **{name: versions[name] for name in ("torch", "python", "cpu")},
        },
    }


def ema_modules(config: Config, parts: Mapping[str, Part], device: torch.device) -> Mapping[str, nn.Module]:
    """Returns modules with the parts' EMA weights as they are now; with offload, one part's at a time."""

    def build(name: str) -> nn.Module:
        part, module = parts[name], build_module(config, name).to(device).eval()
        module.load_state_dict(parallel.whole({**part.module.state_dict(), **part.ema}))  # buffers are not averaged
        return module

    if config.train.offload:
        return OneResident(list(parts), build)
    return {name: build(name) for name in parts}


def train(
    config: Config,
    objective: Objective,
    source: Source,
    folder: Path,
    hardware: Hardware,
    description: dict[str, Any],
    draw_grid: Callable[[Mapping[str, nn.Module], Path], None],
    measure: Callable[[Mapping[str, nn.Module], int], None],
    on_row: Callable[[dict[str, Any]], None],
    world: World = ALONE,
) -> None:
    """Trains the job's blocks to their last step, from the checkpoint in `folder` if there is one.

    Args:
        source: gives each step its batch.
        description: of the run, see `describe`; checkpoint.check_resume has compared it.
        draw_grid: draws samples of a whole model, given its modules with EMA weights, into a PNG, at intervals.
        measure: scores such a model after a number of steps of all blocks together, at intervals.
        on_row: receives each row of metrics.jsonl.
        world: the processes that share the job's blocks; the first one writes.

    Raises:
        SettingError: the checkpoint has made more steps than that.
        NonFiniteLoss: a loss that is not finite.
        Stopped: after SIGTERM or Ctrl-C, when the checkpoint is written.
    """
    settings = config.train
    steps = steps_per_block(config, objective)
    order = update_order(config.seed, settings.block_order, block_shares(config, objective), sum(steps))
    order = in_runs(order, settings.switch_every)
    owned = configuration.owned_blocks(config)
    trained = {block: trained_parts(config, block) for block in owned}
    configuration.require(
        min(steps) > 0,
        f"train.steps={settings.steps}: block {steps.index(min(steps))} would not be trained at all; take more steps, or "
        "train.block_order=shuffled",
    )

    run = checkpoint.read_run(folder)
    if run is not None and all(run["parts"][trained[block][0]]["step"] == steps[block] for block in owned):
        return  # finished
    names = sorted({name for block in owned for name in trained[block]})
    parts: dict[str, Part] = {}
    for name in names:
        parts[name] = build_part(config, name, hardware.device, world)
        if settings.offload:
            place(parts[name], torch.device("cpu"))
    if run is None and settings.init_from is not None:
        begin_from(config, parts)
    if run is not None:
        for name, part in parts.items():
            checkpoint.restore(folder, run, name, part)
        for block in owned:
            made = parts[trained[block][0]].step
            configuration.require(
                made <= steps[block],
                f"train.steps={settings.steps}: the checkpoint in {folder} has made {made} steps of block {block} already",
            )
    # Compiled, blocks of one shape share one graph; a batch's rest in micro-batches has a graph of its own.
    compiled = functools.partial(torch.compile, dynamic=False)
    modules = {name: compiled(part.module) if settings.compile else part.module for name, part in parts.items()}
    modules = {name: parallel.wrapped(module, world, settings.shard) for name, module in modules.items()}
    made = {block: parts[trained[block][0]].step for block in owned}
    metrics = Metrics(folder / "metrics.jsonl", made, on_row, keep=world.first)

    def write_metrics(block: int) -> float | None:
        part = parts[trained[block][0]]
        if hardware.device.type == "cuda":  # steps are queued there: what they have left to do belongs to their time
            started = time.perf_counter()
            torch.cuda.synchronize(hardware.device)
            part.seconds += time.perf_counter() - started
        rate = learning_rate(settings, max(part.step - 1, 0), steps[block])
        return metrics.write(block, part.step, rate=rate, seconds=round(part.seconds, 3))

    def save() -> None:
        for block in owned:
            write_metrics(block)  # reads every loss: a checkpoint never holds what came after a bad one
        checkpoint.save(folder, parts, description, world.first)
        world.wait()

    # What is left to do: each block's steps from its own count on, whatever order earlier sessions followed.
    seen: dict[int, int] = defaultdict(int)
    todo = []
    for block in order.tolist():
        seen[block] += 1
        if block in owned and seen[block] > parts[trained[block][0]].step:
            todo.append(block)
    done = sum(parts[trained[block][0]].step for block in owned)
    losses: dict[int, float] = {}
    bar = tqdm(
        total=done + len(todo), initial=done, unit="step", desc="training", disable=not (config.log.progress and world.first)
    )
    with stop_signals() as stop, bar:
        for index, block in enumerate(todo):
            if settings.offload and (index == 0 or block != todo[index - 1]):
                make_resident(parts, trained[block], hardware.device)
            own = [parts[name] for name in trained[block]]
            loss = train_step(settings, objective, source, modules, own, block, steps[block], hardware, world)
            if index + 1 < len(todo):
                source.prefetch(todo[index + 1], parts[trained[todo[index + 1]][0]].step, settings.batch_size)
            metrics.add(block, loss)
            done += 1
            bar.update()
            if own[0].step % settings.log_every == 0:
                losses[block] = write_metrics(block)
                bar.set_postfix_str(" ".join(f"{b}:{value:.3f}" for b, value in sorted(losses.items())))
            # Before a checkpoint: a run that goes on from one never misses what was due at its step.
            if len(owned) == len(steps):  # the model is whole
                if settings.sample_every and done % settings.sample_every == 0:
                    averaged = ema_modules(config, parts, hardware.device)
                    if world.first:
                        draw_grid(averaged, folder / "samples" / f"step_{done:09d}.png")
                    world.wait()
                if settings.evaluate_every and done % settings.evaluate_every == 0:
                    averaged = ema_modules(config, parts, hardware.device)
                    if world.first:
                        measure(averaged, done)
                    world.wait()
            if world.agree(int(bool(stop))):
                break
            if done % settings.checkpoint_every == 0:
                save()
        save()
        if number := world.agree(stop[0] if stop else 0):
            bar.close()
            tqdm.write(f"stopped by signal {number} after {done} steps; the same command goes on from here")
            raise Stopped(128 + number)
    if world.first:
        plots.plot_training_loss(read_metrics(folder / "metrics.jsonl"), folder / "plots" / "loss.png", len(steps))
