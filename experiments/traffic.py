"""What several processes send each other in an optimizer step, by how the work is divided: `python -m experiments.traffic`.

The table of docs/scaling.md is what this prints.
"""

from typing import NamedTuple

NUMBER = 4  # bytes of a parameter and of a gradient, as they travel here
ACTIVATION = 2  # bytes of an activation or its gradient, bf16
PROCESSES, GROUPS = 64, 4
GBIT = 1e9 / 8  # bytes a second


class Size(NamedTuple):
    """A model as its traffic sees it: parameters in all and of one of four blocks, and numbers at the border of two layers."""

    name: str
    parameters: float
    block: float
    border: float


MODELS = (
    # counted; batch 512 of 256 tokens, width 1,024
    Size("DiT-L/2", 457.82e6, 117.81e6, 512 * 256 * 1024),
    # Llama 2's: 32 layers of 202.4 M, width 4,096, two tables of 32,000 tokens, which each block has; 4 M tokens a batch
    Size("7B", 6.738e9, 32 / GROUPS * 202.4e6 + 2 * 32_000 * 4096, 4e6 * 4096),
)


def bytes_per_step(parameters: float, processes: int, sharded: bool = False, border: float = 0.0) -> float:
    """Returns the bytes that one process sends in an optimizer step.

    A ring gathers N numbers in n processes by n - 1 messages of N / n from each, and adds up and scatters them by as many.
    Summing gradients takes both. Sharded (FSDP), parameters are gathered for the forward and again for the backward pass, and
    gradients scattered.

    Args:
        parameters: of the part that the processes share.
        processes: that share it.
        sharded: whether each holds its share of it alone.
        border: activations that this process hands on, and whose gradients it hands back, in a pipeline.
    """
    rounds = 3 if sharded else 2
    return rounds * (processes - 1) / processes * parameters * NUMBER + 2 * border * ACTIVATION


def table() -> str:
    """Returns the table, in Markdown: a row per way of dividing the work, bytes and seconds at 10 Gbit/s for each model."""
    sharing = PROCESSES // GROUPS
    rows = {
        "data-parallel, end to end": lambda m: bytes_per_step(m.parameters, PROCESSES),
        "FSDP, end to end": lambda m: bytes_per_step(m.parameters, PROCESSES, sharded=True),
        f"pipeline of {GROUPS} stages, {sharing} replicas": lambda m: bytes_per_step(
            m.parameters / GROUPS, sharing, border=m.border / sharing
        ),
        f"{GROUPS} blocks, {sharing} processes each": lambda m: bytes_per_step(m.block, sharing),
        f"{GROUPS} blocks, {sharing} processes each, FSDP": lambda m: bytes_per_step(m.block, sharing, sharded=True),
        "a block per process": lambda m: bytes_per_step(m.block, 1),
    }
    lines = [f"| {PROCESSES} processes | " + " | ".join(f"{m.name}, GB | s at 10 Gbit/s" for m in MODELS) + " |"]
    lines.append("|---|" + "---|---|" * len(MODELS))
    for name, sent in rows.items():
        cells = " | ".join(f"{sent(m) / 1e9:.2f} | {sent(m) / (10 * GBIT):.2f}" for m in MODELS)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
