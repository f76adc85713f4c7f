"""Several processes on torch's launcher: who does what, and the few things that they have to tell each other.

    torchrun --nproc-per-node 3 main.py train.parallel=blocks

Every process runs the whole program. They meet at the start of a run, where the first one has checked the settings and holds
the folder; whatever they divide is divided into whole batches, blocks, or rows of a batch that each of them drew whole.
"""

import contextlib
import datetime
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from config import Config, SettingError, require, trained_blocks

STEP_LIMIT = datetime.timedelta(minutes=10)  # for an answer within a step; a process that died is noticed at once
WAIT_LIMIT = datetime.timedelta(days=30)  # for the others to finish their share


class ProcessLost(RuntimeError):
    """Another process of the run ended or does not answer."""


@dataclass(frozen=True)
class World:
    """The processes that work together, and this one's place among them.

    Attributes:
        rank: this process's number, from 0.
        size: how many they are.
        steps: the group that gradients, losses and signals travel through; None for one process.
        waits: the group for waiting on work that takes as long as it takes.
    """

    rank: int = 0
    size: int = 1
    steps: dist.ProcessGroup | None = None
    waits: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """Returns this process's rows of a batch; its size is a multiple of theirs."""
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def add(self, value: Tensor) -> Tensor:
        """Returns the sum of the processes' values, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.steps)
        return value

    def agree(self, number: int) -> int:
        """Returns the largest of the processes' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.steps)
        return int(found)

    def wait(self) -> None:
        """Returns when all of them are here."""
        if self.size > 1:
            dist.barrier(group=self.waits)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Lets the first process through, then the others, who find what it made.

        Where it refuses a setting, and says so, they end without a word of their own.
        """
        if not self.first and self._refused():
            with contextlib.suppress(RuntimeError):
                self.wait()  # for the end of the first, whose message an earlier end of this one would cut off
            raise SystemExit(1)
        try:
            yield
        except SettingError:
            if self.first:
                self._refused(by_this=True)
            raise
        if self.first:
            self._refused()

    def _refused(self, by_this: bool = False) -> bool:
        """Returns, when all of them are here, whether one refuses."""
        found = torch.tensor(int(by_this))
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.waits)
        return bool(found)

    def split(self, groups: int) -> tuple[int, "World"]:
        """Divides the processes into `groups` groups of neighbours; returns the number of this one's group, and the group."""
        size = self.size // groups
        if size == 1:
            return self.rank, ALONE
        number, rank = divmod(self.rank, size)
        members = [list(range(group * size, (group + 1) * size)) for group in range(groups)]
        steps = [dist.new_group(ranks, timeout=STEP_LIMIT) for ranks in members]
        waits = [dist.new_group(ranks, timeout=WAIT_LIMIT, backend="gloo") for ranks in members]
        return number, World(rank, size, steps[number], waits[number])


ALONE = World()


def local_device(device: str) -> str:
    """Returns the device of this process: of several on one machine, each has a GPU of its own."""
    if dist.is_torchelastic_launched() and device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Yields the world that torch's launcher started, or this process alone.

    Raises:
        ProcessLost: another process ended, or does not answer.
    """
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=STEP_LIMIT)
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, dist.new_group(timeout=WAIT_LIMIT, backend="gloo"))
    try:
        yield world
    except RuntimeError as error:  # gloo's and NCCL's errors have no class of their own
        if not re.search("gloo|nccl|connection (closed|reset)|timed out", str(error), re.IGNORECASE):
            raise
        raise ProcessLost(
            f"process {world.rank} of {world.size} lost another one, whose own message says why; the same command goes on from "
            "the last checkpoint"
        ) from error
    dist.destroy_process_group()


def check(config: Config, world: World, shared: bool = False) -> None:
    """Refuses a way of training that does not fit the number of processes.

    Args:
        shared: whether blocks have parts in common.

    Raises:
        SettingError: names the setting.
    """
    train, blocks = config.train, trained_blocks(config)
    require(
        world.size == 1 or config.mode not in ("merge", "profile", "plan"),
        f"mode={config.mode} is the work of one process, not of {world.size}",
    )
    if config.mode not in ("run", "train"):
        return
    if train.parallel is None:
        require(world.size == 1, f"train.parallel=null with {world.size} processes: set train.parallel=blocks or data")
        require(not train.shard, "train.shard=true spreads a block over processes: set train.parallel too")
        return
    require(
        world.size > 1,
        f"train.parallel={train.parallel} needs several processes: start `torchrun --nproc-per-node N main.py ...`",
    )
    require(
        config.method.name in ("diffusion_blocks", "end_to_end", "shallow") and not shared,
        f"train.parallel={train.parallel} is for blocks that share nothing and for plain end to end: "
        "leave it out and start one process",
    )
    sharing = world.size
    if train.parallel == "blocks":
        require(blocks > 1, "train.parallel=blocks needs more than one block: set train.parallel=data")
        require(train.blocks == "all", f"train.parallel=blocks trains all blocks: leave train.blocks={train.blocks} out")
        require(
            world.size <= blocks or world.size % blocks == 0,
            f"train.parallel=blocks: {world.size} processes are neither at most {blocks}, one or more blocks for each, nor a "
            f"multiple of it, a group for each block",
        )
        sharing = max(world.size // blocks, 1)
    require(
        train.batch_size % sharing == 0,
        f"train.batch_size={train.batch_size} does not divide among the {sharing} processes that share a block",
    )
    require(not train.shard or sharing > 1, "train.shard=true spreads a block over processes, but each block has one")
    require(not (train.shard and train.compile), "train.shard=true and train.compile=true do not go together: choose one")


# ---------------------------------------------------------------------------------------------------------------------
# A block in the hands of several processes


def shard(module: nn.Module, world: World, device: torch.device) -> None:
    """Spreads a block's parameters over the processes, layer by layer (FSDP2): each holds its share, on the device."""
    mesh = DeviceMesh.from_group(world.steps, device.type)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def wrapped(module: nn.Module, world: World, sharded: bool) -> nn.Module:
    """Returns the module whose backward pass averages gradients over the processes."""
    if world.size == 1 or sharded:
        return module
    shared = DistributedDataParallel(module, process_group=world.steps, gradient_as_bucket_view=True)
    shared.broadcast_buffers = False  # they are constants; as an argument it has another name in every other version
    return shared


@contextlib.contextmanager
def travelling(modules: Iterable[nn.Module], last: bool) -> Iterator[None]:
    """The context of a micro-batch: gradients travel after the last one of a step alone."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
            elif isinstance(module, DistributedDataParallel) and not last:
                stack.enter_context(module.no_sync())
        yield


def whole(value: Any) -> Any:
    """Returns tensors, in dictionaries and lists, without sharding; all processes that share them must ask."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor as this process holds one of `like`'s kind: as it is, or its share of it."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def placed_state(state: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Returns an optimizer's whole state as this process holds it."""
    moments = {
        index: {key: placed(value, parameters[index]) if value.ndim else value for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}
