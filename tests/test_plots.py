"""Plots and image grids: the files that come out, read back and looked into."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dblock_modules import LogNormalLevels, make_partition, widen_log
from plots import block_color, image_grid, plot_loss_by_level, plot_partition, plot_training_loss

LEVELS = LogNormalLevels()


def read_png(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def has_color(picture: np.ndarray, block: int, num_blocks: int) -> bool:
    """Tells whether some pixel has the block's own colour, undiluted."""
    color = np.round(np.array(block_color(block, num_blocks)[:3]) * 255)
    return bool((np.abs(picture - color) <= 2).all(axis=-1).any())


def training_rows(num_blocks: int, steps: int = 60) -> list[dict[str, float]]:
    return [
        {"block": block, "step": step, "loss": (block + 1) / step**0.5, "rate": 1e-3}
        for step in range(1, steps)
        for block in range(num_blocks)
    ]


def draw_training_loss(num_blocks: int, path: Path) -> None:
    plot_training_loss(training_rows(num_blocks), path)


def draw_loss_by_level(num_blocks: int, path: Path) -> None:
    levels = np.geomspace(0.002, 80, 30)
    curves = {"blocks": (levels, 0.1 + np.log(levels) ** 2), "end to end": (levels, 0.2 + np.log(levels) ** 2)}
    plot_loss_by_level(curves, make_partition("equi_probability", num_blocks, LEVELS).edges, path)


def draw_partition(num_blocks: int, path: Path, overlap: float = 0.1) -> None:
    partition = make_partition("equi_probability", num_blocks, LEVELS)
    intervals = [widen_log(*partition.interval(block), overlap, LEVELS.minimum, LEVELS.maximum) for block in range(num_blocks)]
    plot_partition(LEVELS, partition.edges, intervals, path)


@pytest.mark.parametrize("num_blocks", [1, 3, 6])
@pytest.mark.parametrize("draw", [draw_training_loss, draw_loss_by_level, draw_partition])
def test_plot_is_a_readable_png_and_repeats_to_the_byte(draw, num_blocks, tmp_path):
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    draw(num_blocks, first)
    draw(num_blocks, second)
    height, width, _ = read_png(first).shape
    assert 500 <= height <= 1000
    assert 800 <= width <= 1200
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
def test_every_block_appears_in_its_own_color(num_blocks, tmp_path):
    draw_training_loss(num_blocks, tmp_path / "loss.png")
    draw_partition(num_blocks, tmp_path / "partition.png")
    for name in ("loss.png", "partition.png"):
        picture = read_png(tmp_path / name)
        assert all(has_color(picture, block, num_blocks) for block in range(num_blocks))


def test_colors_get_lighter_from_block_to_block():
    luminance = np.array([0.2126, 0.7152, 0.0722])
    for num_blocks in (2, 3, 6, 12):
        colors = np.array([block_color(block, num_blocks)[:3] for block in range(num_blocks)])
        assert (np.diff(colors @ luminance) > 0).all()


def test_job_that_trains_one_block_draws_it_in_the_models_colors(tmp_path):
    rows = [row for row in training_rows(3) if row["block"] == 1]
    plot_training_loss(rows, tmp_path / "loss.png", num_blocks=3)
    picture = read_png(tmp_path / "loss.png")
    assert [has_color(picture, block, 3) for block in range(3)] == [False, True, False]


def test_losses_that_a_logarithmic_axis_cannot_show_change_nothing(tmp_path):
    rows = training_rows(2)
    bad = [{"block": 0, "step": 100, "loss": loss} for loss in (float("nan"), float("inf"), 0.0, -1.0)]
    plot_training_loss(rows, tmp_path / "clean.png")
    plot_training_loss(rows + bad, tmp_path / "bad.png")
    assert (tmp_path / "clean.png").read_bytes() == (tmp_path / "bad.png").read_bytes()


@pytest.mark.parametrize("loss", [0.5, float("nan")])
def test_a_single_row_is_drawn(loss, tmp_path):
    plot_training_loss([{"block": 0, "step": 1, "loss": loss}], tmp_path / "loss.png")
    read_png(tmp_path / "loss.png")


def test_no_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        plot_training_loss([], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_overlap_is_visible(tmp_path):
    draw_partition(3, tmp_path / "without.png", overlap=0.0)
    draw_partition(3, tmp_path / "with.png", overlap=0.3)
    without, widened = read_png(tmp_path / "without.png"), read_png(tmp_path / "with.png")
    assert without.shape == widened.shape
    assert (without != widened).any(axis=-1).sum() > 500


@pytest.mark.parametrize("channels", [1, 3])
def test_grid_holds_every_image_pixel_for_pixel(channels, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (7, channels, 8, 6), dtype=np.uint8)
    image_grid(images, tmp_path / "grid.png", columns=3, scale=4)
    grid = read_png(tmp_path / "grid.png")
    height, width, border = 8 * 4, 6 * 4, 2
    assert grid.shape == (3 * (height + border) + border, 3 * (width + border) + border, 3)
    for index, image in enumerate(images):
        top = border + (index // 3) * (height + border)
        left = border + (index % 3) * (width + border)
        cell = grid[top : top + height, left : left + width]
        # Every scale x scale square is one pixel of the image; a grey image has three equal channels.
        expected = np.broadcast_to(image.transpose(1, 2, 0), (8, 6, 3)).repeat(4, axis=0).repeat(4, axis=1)
        np.testing.assert_array_equal(cell, expected)


def test_grid_takes_read_only_arrays_and_tensors_and_repeats_to_the_byte(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    image_grid(torch.from_numpy(images), tmp_path / "tensor.png")
    images.setflags(write=False)
    image_grid(images, tmp_path / "array.png")
    assert (tmp_path / "array.png").read_bytes() == (tmp_path / "tensor.png").read_bytes()


@pytest.mark.parametrize(("size", "shown"), [(8, 64), (28, 84), (32, 64), (256, 256)])
def test_small_images_are_enlarged_to_at_least_64_pixels(size, shown, tmp_path):
    image_grid(np.zeros((1, 1, size, size), dtype=np.uint8), tmp_path / "grid.png")
    assert read_png(tmp_path / "grid.png").shape == (shown, shown, 3)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 1, 4, 4), dtype=np.float32),
        np.zeros((2, 2, 4, 4), dtype=np.uint8),
        np.zeros((1, 4, 4), dtype=np.uint8),
        np.zeros((0, 1, 4, 4), dtype=np.uint8),
    ],
)
def test_grid_refuses_what_is_not_a_batch_of_pictures(images, tmp_path):
    with pytest.raises(ValueError, match="uint8"):
        image_grid(images, tmp_path / "grid.png")


@pytest.mark.parametrize("setting", [{"columns": 0}, {"scale": 0}])
def test_grid_refuses_columns_and_scale_below_1(setting, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        image_grid(np.zeros((1, 1, 4, 4), dtype=np.uint8), tmp_path / "grid.png", **setting)
