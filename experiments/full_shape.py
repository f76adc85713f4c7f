"""A training step of every block of the ImageNet experiment at full shape, on random latents, against the profiler's counts.

    python -m experiments.full_shape        # on a CPU: 2 minutes; 4 GB for a block, 11 GB for end to end

Each job is a process of its own. The table of docs/scaling.md is what this prints.
"""

import gc
import multiprocessing
import re
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import config as configuration
import hardware as machine
import main
from profiling import activation_bytes, count, held_bytes, make_job, predicted_activations, predicted_state, variant

EXPERIMENT = "imagenet256_dit_l2"
MIB = 2**20


def resident(name: str) -> int:
    """Returns the bytes of this process that Linux counts: VmRSS, or VmHWM, the most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def row(num_blocks: int, block: int) -> str:
    """Makes two of a block's steps at micro-batch 1 and returns its row of the table, in MiB."""
    with initialize_config_dir(str(Path(main.__file__).resolve().parent / "configs"), version_base="1.3"):
        composed = compose("config", [f"experiment={EXPERIMENT}", "train.batch_size=1"])
    config = variant(configuration.resolve(OmegaConf.to_object(composed)), num_blocks)
    hardware = machine.set_up("cpu", config.train.precision, 1)
    before = resident("VmRSS")
    job = make_job(config, hardware, block)
    held = held_bytes(job)
    job.step()  # AdamW's moments come with the first step, and are there throughout the second
    most, activations = resident("VmHWM") - before, activation_bytes(job)
    layers = job.layers
    del job
    gc.collect()
    counts = count(config, hardware)
    state, predicted = predicted_state(counts, layers), predicted_activations(counts, layers, 1, False)
    name = "end to end" if num_blocks == 1 else f"block {block} of {num_blocks}"
    total = sum(held.values()) + activations
    sizes = [*held.values(), activations, total, state + predicted]
    cells = [name, hardware.precision, *(f"{size / MIB:.1f}" for size in sizes), f"{total / (state + predicted) - 1:+.5%}"]
    return f"| {' | '.join(cells)} | {most / MIB:.0f} |"


def run() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(
        "| | precision | parameters | gradients | AdamW | EMA | activations | sum | predicted | difference | resident, at most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for num_blocks, block in ((3, 0), (3, 1), (3, 2), (1, 0)):
        with spawn.Pool(1) as pool:
            print(pool.apply(row, (num_blocks, block)), flush=True)


if __name__ == "__main__":
    run()
