"""What each of two processes does for test_parallel.py, started by torch's launcher: python -m torch.distributed.run ..."""

import contextlib
import sys
from pathlib import Path

import torch
from conftest import make_config

import generation
import parallel
import pipeline
from data import BatchSource
from hardware import Hardware
from model import build_objective
from parallel import World
from train import build_part, train_step

SETTINGS = {"steps": 20, "batch_size": 16}


def first_gradients(world: World, folder: Path, cache: Path) -> dict[str, torch.Tensor]:
    """Returns the whole batch's gradients of block 1's first step; each process computes its rows."""
    config = make_config(cache=cache, train={**SETTINGS, "clip_norm": None})
    part = build_part(config, "block_1", torch.device("cpu"), world)
    found = {}
    part.optimizer.step = lambda: found.update({name: value.grad.clone() for name, value in part.module.named_parameters()})
    source = BatchSource(generation.load(config), "cpu", seed=0)
    modules = {"block_1": parallel.wrapped(part.module, world, sharded=False)}
    hardware = Hardware(torch.device("cpu"), "fp32", 1)
    train_step(config.train, build_objective(config), source, modules, [part], 1, 20, hardware, world)
    return found


def main(folder: Path, cache: Path) -> None:
    """Runs every setting that test_parallel.py compares with one process, one after the other in the same two processes."""
    with parallel.joined(torch.device("cpu")) as world:
        parallel.joined = lambda device: contextlib.nullcontext(world)

        def run(name: str, mode: str = "train", **train: object) -> None:
            config = make_config(
                cache=cache,
                mode=mode,
                out=str(folder / name),
                log={"progress": False},
                sampler={"num_images": 10, "batch_size": 4, "steps": 3, "schedule": "per_block"},
                train={**SETTINGS, **train},
            )
            pipeline.run(config)

        for name, parallel_ in (("apart", "blocks"), ("rows", "data")):
            run(name, parallel=parallel_)
            run(name, mode="sample")
        run("apart_longer", parallel="blocks", steps=3)
        run("apart_longer", parallel="blocks", steps=3)
        run("micro", parallel="data", micro_batch=3)
        run("sharded", parallel="data", shard=True)
        for steps in (8, 20):
            for name, shard in (("resumed", False), ("sharded_resumed", True)):
                config = make_config(
                    cache=cache,
                    mode="train",
                    folder=str(folder / name),
                    log={"progress": False},
                    train={**SETTINGS, "parallel": "data", "shard": shard, "steps": steps},
                )
                pipeline.run(config)
        train = {"steps": 150, "parallel": "data"}
        pipeline.run(make_config(cache=cache, mode="train", folder=str(folder / "long"), log={"progress": False}, train=train))
        gradients = first_gradients(world, folder, cache)
        _, pair = world.split(1)
        if world.first:
            torch.save(gradients, folder / "gradients.pt")
        assert int(pair.add(torch.tensor(world.rank + 1))) == 3 and pair.agree(world.rank) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
