"""Samplers against closed forms, and images that depend on their own seed alone."""

import json

import numpy as np
import pytest
import torch
from conftest import make_config
from test_model import random_model

import sampler
from config import SamplerConfig, SettingError
from dblock_modules import LogNormalLevels, karras_schedule, make_partition, make_schedule
from sampler import SAMPLERS, euler, heun


@pytest.mark.parametrize("name", ["karras", "equi_probability", "per_block"])
def test_perfect_denoiser_lands_on_the_noisy_data(name):
    """With D = y every Euler step lands on y + sigma_next eps, and the last on y."""
    levels = LogNormalLevels()
    schedule = make_schedule(name, 9, levels, make_partition("equi_probability", 3, levels))
    y, eps = torch.randn(2, 3, dtype=torch.float64)
    seen = []

    def denoiser(z, sigma):
        seen.append((z.clone(), sigma))
        return y

    start = (y + schedule[0] * eps) / schedule[0]
    assert torch.allclose(euler(denoiser, start, schedule), y, atol=1e-10)
    assert [sigma for _, sigma in seen] == schedule.tolist()
    for z, sigma in seen:
        assert torch.allclose(z, y + sigma * eps, atol=1e-10)


@pytest.mark.parametrize("name", ["euler", "heun"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_number_of_evaluations(name, n):
    calls = []
    SAMPLERS[name](lambda z, sigma: calls.append(sigma) or z / 2, torch.randn(2, 3), karras_schedule(n, 0.002, 80.0))
    assert len(calls) == (n if name == "euler" else 2 * n - 1)


def gaussian_error(solve, steps: int, low: float = 0.01) -> float:
    """Error of a solver on data N(0, .25), where x_0 = x_T sqrt(s^2 + low^2) / sqrt(s^2 + sigma_max^2) is exact at sigma=low."""
    levels = np.geomspace(80.0, low, steps + 1)
    s2 = 0.25
    noise = torch.ones(1, dtype=torch.float64)
    reached = {}

    def denoiser(z, sigma):
        reached.setdefault(sigma, z)
        return z * s2 / (s2 + sigma**2)

    solve(denoiser, noise, levels)
    exact = 80.0 * np.sqrt((s2 + low**2) / (s2 + 80.0**2))
    return abs(float(reached[levels[-1]]) - exact)


def test_solver_orders():
    """Doubling the steps halves Euler's error and quarters Heun's."""
    ratio_euler = gaussian_error(euler, 200) / gaussian_error(euler, 400)
    ratio_heun = gaussian_error(heun, 200) / gaussian_error(heun, 400)
    assert ratio_euler == pytest.approx(2, abs=0.05) and ratio_heun == pytest.approx(4, abs=0.15)


def test_gaussian_data_come_out():
    noise = torch.randn(100, dtype=torch.float64)
    x = heun(lambda z, sigma: z * 0.25 / (0.25 + sigma**2), noise, karras_schedule(160, 0.002, 80.0))
    assert torch.allclose(x, noise * 80 * 0.5 / np.sqrt(0.25 + 80**2), rtol=1e-3)


def test_image_depends_on_its_own_seed_alone():
    model, _ = random_model(make_config())
    settings = SamplerConfig(steps=6, schedule="per_block", num_images=8, guidance=1.5)
    together, labels = sampler.sample_images(model, settings)
    apart = torch.cat([sampler.sample_images(model, settings, i, i + 1)[0] for i in range(8)])
    assert (together.int() - apart.int()).abs().max() <= 1
    assert labels.tolist() == list(range(8))
    other = sampler.sample_images(model, SamplerConfig(steps=6, schedule="per_block", num_images=8, seed=1))[0]
    assert (together != other).any(dim=(1, 2, 3)).all()


@pytest.mark.parametrize(("labels", "expected"), [("balanced", [0, 1, 2, 3, 4]), (3, [3] * 5), ([7, 2], [7, 2, 7, 2, 7])])
def test_labels(labels, expected):
    assert sampler.choose_labels(SamplerConfig(labels=labels), 10, 0, 5).tolist() == expected
    assert sampler.choose_labels(SamplerConfig(labels=labels), 10, 2, 5).tolist() == expected[2:]


def test_unvisited_block_warns_and_is_counted(tmp_path):
    model, _ = random_model(make_config())
    settings = SamplerConfig(steps=3, schedule="karras", num_images=2)
    with pytest.warns(UserWarning, match=r"never visits block \[1\]"):
        path = sampler.write_images(model, settings, tmp_path, {}, progress=False)
    assert json.loads((path.parent / "protocol.json").read_text())["visits"] == [2, 0, 1]


def test_images_are_resumed_after_the_last_whole_batch(tmp_path, monkeypatch):
    model, _ = random_model(make_config())
    settings = SamplerConfig(steps=3, schedule="per_block", num_images=10, batch_size=4, format="png")
    whole = sampler.load_arrays(sampler.write_images(model, settings, tmp_path / "whole", {}, progress=False))
    assert whole[0].shape == (10, 1, 8, 8) and whole[1].tolist() == [*range(10)]
    assert len(list((tmp_path / "whole" / "images").glob("*.png"))) == 10
    drawn, draw = [], sampler.sample_images

    def interrupted(model, settings, start, stop):
        if start == 4 and not drawn.count(4):
            drawn.append(4)
            raise KeyboardInterrupt
        drawn.append(start)
        return draw(model, settings, start, stop)

    monkeypatch.setattr(sampler, "sample_images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.write_images(model, settings, tmp_path / "cut", {}, progress=False)
    again = sampler.load_arrays(sampler.write_images(model, settings, tmp_path / "cut", {}, progress=False))
    assert drawn == [0, 4, 4, 8]
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))
    before = list(drawn)
    sampler.write_images(model, settings, tmp_path / "cut", {}, progress=False)
    assert drawn == before  # finished: nothing is drawn again


def test_damaged_samples_are_drawn_again(tmp_path):
    model, _ = random_model(make_config())
    settings = SamplerConfig(steps=3, schedule="per_block", num_images=4)
    path = sampler.write_images(model, settings, tmp_path, {}, progress=False)
    before = sampler.load_arrays(path)
    path.write_bytes(path.read_bytes()[:200])
    after = sampler.load_arrays(sampler.write_images(model, settings, tmp_path, {}, progress=False))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_heun_s_second_evaluation_is_routed_by_its_own_level():
    """At a block's edge the corrected slope is the next block's: it owns that level."""
    model, _ = random_model(make_config())
    edges = model.objective.partition.edges
    seen = []
    denoise = model.denoiser(torch.arange(2))

    def recorded(z, sigma):
        seen.append(model.objective.partition.block_of(sigma))
        return denoise(z, sigma)

    heun(recorded, torch.randn(2, 1, 8, 8), np.array(edges[:-1]))
    assert seen == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_is_said_in_a_sentence(tmp_path, monkeypatch, at):
    """In either batch, or when they are joined; what is whole stays, and the same command goes on to the same images."""
    model, _ = random_model(make_config())
    settings = SamplerConfig(steps=3, schedule="per_block", num_images=10, batch_size=5)
    whole = sampler.load_arrays(sampler.write_images(model, settings, tmp_path / "whole", {}, progress=False))
    original, made = np.savez, []

    def savez(file, **arrays):
        made.append(1)
        if len(made) == at + 1:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        original(file, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(SettingError, match="cannot be written .No space left on device.: make room"):
        sampler.write_images(model, settings, tmp_path / "full", {}, progress=False)
    assert len(list((tmp_path / "full" / "batches").iterdir())) == at and not (tmp_path / "full" / "samples.npz").exists()
    again = sampler.load_arrays(sampler.write_images(model, settings, tmp_path / "full", {}, progress=False))
    assert all(np.array_equal(*pair) for pair in zip(whole, again, strict=True))
