"""Plots of a run, and grids of images, as PNG files.

Plain data in, a file out. Everything goes through matplotlib's object interface on its Agg canvas: no display, and nothing
that one plot leaves behind for the next, so the same input gives the same bytes. Block b has the same colour in every plot.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike
from PIL import Image
from scipy.ndimage import median_filter
from torchvision.utils import make_grid

from dblock_modules import LevelDistribution

# Okabe and Ito's colours for curves that are not blocks; line styles tell them apart in print as well.
CURVE_COLORS = ("#000000", "#D55E00", "#0072B2", "#CC79A7", "#009E73", "#E69F00")
CURVE_STYLES = ("-", "--", "-.", ":")


def block_color(block: int, num_blocks: int) -> tuple[float, float, float, float]:
    """Returns the colour of a block, RGBA in [0, 1]: dark for the noisiest, light for the cleanest.

    Viridis differs in lightness all along, so the order can be read without seeing hues; its palest end is left out, which
    would vanish on white.
    """
    return colormaps["viridis"](0.88 * block / max(num_blocks - 1, 1))


def plot_training_loss(rows: Sequence[Mapping[str, float]], path: str | Path, num_blocks: int | None = None) -> None:
    """Draws the training loss of every block over the block's own steps.

    Faint: every logged loss. Strong: the running median over a tenth of the block's points.

    Args:
        rows: objects of `metrics.jsonl` with at least `block`, `step` (the block's own count) and `loss`; losses that a
            logarithmic axis cannot show (zero, negative, not finite) are left out.
        num_blocks: of the model, for the colours; a job that trains some blocks only has rows of those. By default, as many
            as the rows show.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError("there is no training loss to draw: no rows were given")
    blocks = sorted({int(row["block"]) for row in rows})
    if num_blocks is None:
        num_blocks = blocks[-1] + 1
    figure, axes = _figure(title="Training loss per block", xlabel="steps of the block", ylabel="loss")
    for block in blocks:
        points = sorted((row["step"], row["loss"]) for row in rows if row["block"] == block)
        steps, losses = np.array([p for p in points if math.isfinite(p[1]) and p[1] > 0]).reshape(-1, 2).T
        color = block_color(block, num_blocks)
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8, marker=".", markersize=3)
        median = median_filter(losses, size=2 * (len(losses) // 20) + 1, mode="reflect")
        axes.plot(steps, median, color=color, linewidth=2, label=f"block {block}")
    _logarithmic_loss(axes)
    axes.legend()
    _save(figure, path)


def plot_loss_by_level(curves: Mapping[str, tuple[ArrayLike, ArrayLike]], edges: Sequence[float], path: str | Path) -> None:
    """Draws held-out loss against level, with the partition behind it.

    Args:
        curves: label -> (levels, losses), both (K,) and positive.
        edges: the partition's num_blocks + 1 levels, decreasing; they are drawn as lines, and each block's interval is shaded.
    """
    xlabel = "level σ  (shaded: the interval of each block, with its number)"
    figure, axes = _figure(title="Held-out loss by level", xlabel=xlabel, ylabel="loss")
    _shade_blocks(axes, edges)
    for index, (label, (levels, losses)) in enumerate(curves.items()):
        axes.plot(
            levels,
            losses,
            label=label,
            color=CURVE_COLORS[index % len(CURVE_COLORS)],
            linestyle=CURVE_STYLES[index % len(CURVE_STYLES)],
            linewidth=1.8,
        )
    _logarithmic_levels(axes, edges)
    _logarithmic_loss(axes)
    axes.legend()
    _save(figure, path)


def plot_partition(
    distribution: LevelDistribution, edges: Sequence[float], intervals: Sequence[tuple[float, float]], path: str | Path
) -> None:
    """Draws the partition: the density of the levels above, the blocks' own and training intervals below.

    Under the density, each block's own interval is filled. Below, each block has a row: a solid bar for its own interval, a
    hatched one for the widened interval that it trains on, so that the levels that two blocks share lie above each other.

    Args:
        distribution: of the levels, over [minimum, maximum] with minimum above 0.
        edges: num_blocks + 1 levels, decreasing.
        intervals: (low, high) of each block's training interval, block 0 (the noisiest) first.
    """
    num_blocks = len(intervals)
    figure = Figure(figsize=(8, 4.6 + 0.22 * num_blocks), dpi=120, layout="constrained")
    density_axes, rows_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 0.4 + 0.3 * num_blocks))

    # Density per ln σ, from differences of the cdf: the interface has no density, and needs none elsewhere.
    grid = torch.linspace(math.log(distribution.minimum), math.log(distribution.maximum), 1001, dtype=torch.float64)
    cdf = distribution.cdf(grid.exp())
    density = (cdf.diff() / grid.diff()).numpy()
    levels = ((grid[1:] + grid[:-1]) / 2).exp().numpy()
    cdf_at_edges = distribution.cdf(torch.tensor(edges, dtype=torch.float64))
    masses = (cdf_at_edges[:-1] - cdf_at_edges[1:]).tolist()

    density_axes.plot(levels, density, color="black", linewidth=1.2)
    for block, (low, high) in enumerate(intervals):
        own_low, own_high = edges[block + 1], edges[block]
        color = block_color(block, num_blocks)
        # Both edges are added, so that neighbouring areas meet and none loses a sliver to the grid.
        x = np.concatenate([[own_low], levels[(levels > own_low) & (levels < own_high)], [own_high]])
        label = f"block {block}: σ {own_low:.3g} to {own_high:.3g}, mass {masses[block]:.3g}"
        density_axes.fill_between(x, np.interp(x, levels, density), color=color, alpha=0.75, linewidth=0, label=label)
        rows_axes.barh(block, high - low, left=low, height=0.8, facecolor="none", edgecolor=color, hatch="/////")
        rows_axes.barh(block, own_high - own_low, left=own_low, height=0.8, color=color)
    for axes in (density_axes, rows_axes):
        for edge in edges:
            axes.axvline(edge, color="black", linewidth=0.6, linestyle=":")

    density_axes.set(title="Partition of the levels", ylabel="density per ln σ")
    density_axes.set_ylim(bottom=0)
    density_axes.legend(loc="upper right", fontsize="small")
    rows_axes.set(xlabel="level σ  (solid: own interval, hatched: what overlap adds in training)", ylabel="block")
    rows_axes.set_yticks(range(num_blocks))
    rows_axes.invert_yaxis()
    _logarithmic_levels(rows_axes, edges)
    _save(figure, path)


def plot_settings(
    labels: Sequence[str],
    settings: Sequence[str],
    ours: Sequence[tuple[str, Mapping[str, Mapping[int, float]]]],
    paper: Mapping[str, Mapping[str, float]],
    metric: str,
    path: str | Path,
) -> None:
    """Draws scores over the settings of a table, a panel for each of ours, the paper's on an axis of its own.

    Args:
        labels: of the settings, in their order.
        ours: (name, setting -> seed -> value); the mean is drawn, with the range over seeds.
        paper: name -> setting -> value; settings that are not there leave a gap.
        metric: what the paper's values are.
    """
    figure = Figure(figsize=(1.2 + 5.4 * len(ours), 4.2), dpi=80, layout="constrained")
    positions = np.arange(len(settings))
    for axes, (name, values) in zip(np.atleast_1d(figure.subplots(1, len(ours))), ours, strict=True):
        known = [i for i, setting in enumerate(settings) if setting in values]
        runs = [list(values[settings[i]].values()) for i in known]
        mean = np.array([np.mean(own) for own in runs])
        reach = [
            [m - min(own) for m, own in zip(mean, runs, strict=True)],
            [max(own) - m for m, own in zip(mean, runs, strict=True)],
        ]
        axes.errorbar(known, mean, yerr=reach, marker="o", color=CURVE_COLORS[0], linewidth=1.8, capsize=3)
        axes.set(title=f"{name} (black)", ylabel=f"ours: {name}", xlim=(-0.5, len(settings) - 0.5))
        axes.set_xticks(positions, labels, fontsize="small", rotation=0 if len(settings) < 7 else 90)
        axes.grid(alpha=0.3)
        theirs = axes.twinx()
        for index, (title, known_values) in enumerate(paper.items()):
            points = [known_values.get(setting, math.nan) for setting in settings]
            color, style = CURVE_COLORS[1 + index % 5], CURVE_STYLES[1 + index % 3]
            theirs.plot(positions, points, marker="s", markersize=4, color=color, linestyle=style, linewidth=1, label=title)
        if paper:
            theirs.set_ylabel(f"the paper's {metric}")
        else:
            theirs.set_axis_off()
    if paper:
        figure.legend(*theirs.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    _save(figure, path)


def plot_levels(levels: ArrayLike, losses: Mapping[str, np.ndarray], reference: str, path: str | Path) -> None:
    """Draws losses over the levels, on the left as they are, on the right over those of a reference.

    Args:
        levels: (K,); losses: label -> (K,), the reference among them.
    """
    figure = Figure(figsize=(12, 4.2), dpi=80, layout="constrained")
    absolute, relative = figure.subplots(1, 2)
    for index, (label, loss) in enumerate(losses.items()):
        color, style = CURVE_COLORS[index % len(CURVE_COLORS)], CURVE_STYLES[index // len(CURVE_COLORS) % len(CURVE_STYLES)]
        absolute.plot(levels, loss, color=color, linestyle=style, linewidth=1.2, label=label)
        relative.plot(levels, loss / losses[reference], color=color, linestyle=style, linewidth=1.5)
    for axes, title in ((absolute, "Held-out loss by level"), (relative, f"over that of {reference}")):
        axes.set(title=title, xlabel="level σ", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    _logarithmic_loss(absolute)
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    _save(figure, path)


def plot_curves(curves: Mapping[str, tuple[ArrayLike, ArrayLike]], path: str | Path) -> None:
    """Draws held-out losses over the training.

    Args:
        curves: label -> (share of the training, loss), both (K,).
    """
    figure = Figure(figsize=(7, 4), dpi=80, layout="constrained")
    axes = figure.subplots()
    axes.set(title="Held-out loss over the training", xlabel="share of the training", ylabel="held-out loss")
    axes.grid(alpha=0.3)
    for index, (label, (x, loss)) in enumerate(curves.items()):
        color, style = CURVE_COLORS[index % len(CURVE_COLORS)], CURVE_STYLES[index % len(CURVE_STYLES)]
        axes.plot(x, loss, label=label, color=color, linestyle=style, marker=".", linewidth=1.5)
    _logarithmic_loss(axes)
    axes.legend()
    _save(figure, path)


def plot_profile(rows: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Draws what one block's job holds, and the time of all blocks' steps, over the number of blocks.

    Args:
        rows: of mode=profile; hatched bars are those with activation checkpointing.
    """
    blocks = sorted({row["num_blocks"] for row in rows})
    figure = Figure(figsize=(9, 4), dpi=80, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    for row in rows:
        at = blocks.index(row["num_blocks"]) + (0.2 if row["checkpointing"] else -0.2)
        hatch, bottom = "//" if row["checkpointing"] else None, 0.0
        for name, color in zip(("parameters", "gradients", "optimizer", "ema", "activations"), CURVE_COLORS[1:], strict=True):
            height = row[f"{name}_bytes"] / 2**20
            label = name if row is rows[0] else None
            memory.bar(at, height, 0.36, bottom=bottom, color=color, hatch=hatch, edgecolor="white", label=label)
            bottom += height
        seconds.bar(at, row["all_blocks_seconds"], 0.36, color=CURVE_COLORS[2], hatch=hatch, edgecolor="white")
    memory.set(title="One block's job (hatched: checkpointing)", ylabel="MiB")
    seconds.set(title="A step of every block", ylabel="seconds")
    memory.legend()
    for axes in (memory, seconds):
        axes.set_xticks(range(len(blocks)), blocks)
        axes.set_xlabel("blocks")
    _save(figure, path)


def image_grid(images: ArrayLike | torch.Tensor, path: str | Path, columns: int | None = None, scale: int | None = None) -> None:
    """Writes a batch of images as one PNG grid, row by row, with 2 grey pixels around each image (a lone image has none).

    Args:
        images: (N, C, H, W), uint8, with C = 1 (grey) or 3 (RGB); an array or a tensor.
        columns: images per row; by default as square a grid as N allows.
        scale: each pixel becomes a square of scale x scale pixels, unblurred; by default the least that makes an image 64
            pixels wide or high.

    Raises:
        ValueError: images of another dtype or shape, none at all, or columns or scale below 1.
    """
    if not isinstance(images, torch.Tensor):
        images = torch.from_numpy(np.array(images))  # a copy: a memory-mapped array is read-only, which torch warns about
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise ValueError(f"a grid needs uint8 images (N, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}")
    if columns is None:
        columns = math.ceil(math.sqrt(len(images)))
    if scale is None:
        scale = math.ceil(64 / max(images.shape[2:]))
    if columns < 1 or scale < 1:
        raise ValueError(f"columns and scale must be at least 1, got columns={columns}, scale={scale}")
    enlarged = images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)  # (N, C, H scale, W scale)
    grid = make_grid(enlarged, nrow=columns, padding=2, pad_value=128)  # (3, height, width)
    Image.fromarray(grid.permute(1, 2, 0).cpu().numpy()).save(path, format="PNG")


def _figure(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _shade_blocks(axes: Axes, edges: Sequence[float]) -> None:
    """Shades each block's interval, writes the block's number at its top, and draws a line at every edge."""
    num_blocks = len(edges) - 1
    for block in range(num_blocks):
        low, high = edges[block + 1], edges[block]
        axes.axvspan(low, high, color=block_color(block, num_blocks), alpha=0.15, linewidth=0)
        axes.text(math.sqrt(low * high), 0.98, str(block), transform=axes.get_xaxis_transform(), ha="center", va="top")
    for edge in edges:
        axes.axvline(edge, color="black", linewidth=0.8, linestyle=":")


def _logarithmic_levels(axes: Axes, edges: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    margin = (edges[0] / edges[-1]) ** 0.02
    axes.set_xlim(edges[-1] / margin, edges[0] * margin)


def _logarithmic_loss(axes: Axes) -> None:
    """Makes the loss axis logarithmic, with ticks that help where losses span less than a decade: 0.1, 0.2, 0.5, 1."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")


def _save(figure: Figure, path: str | Path) -> None:
    FigureCanvasAgg(figure).print_png(path)
