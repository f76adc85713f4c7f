"""Scores: closed forms for loss and likelihood, planted defects and copies for the sample scores, refusals, protocols."""

import json
import math
import urllib.error
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_fidelity
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.ndimage import gaussian_filter

import evaluation
import features
import hardware
from config import SettingError
from data import ImageData, Split, load_images
from dblock_modules import LogNormalLevels, karras_schedule, make_partition
from evaluation import (
    LossGrid,
    check_scores,
    floor_scores,
    heldout_loss,
    log_likelihood,
    loss_grid,
    nearest_train_distance,
    repeat_summary,
    sample_scores,
    summarize_loss,
)
from experiments.train_classifiers import accuracy, translate
from hardware import environment

FID = "frechet_inception_distance"
S = 0.7  # standard deviation of the Gaussian data


# ---------------------------------------------------------------------------------------------------------------------
# Held-out loss


def optimal(z, sigma, labels):
    """The best denoiser of N(0, S^2) data."""
    return S**2 * z / (S**2 + sigma**2)


def test_the_grid_integrates_exactly():
    grid = loss_grid(LogNormalLevels(), 64)
    ratios = grid.levels[1:] / grid.levels[:-1]
    assert np.allclose(ratios, (80 / 0.002) ** (1 / 64), rtol=1e-12)
    assert math.isclose(grid.mass.sum(), 1, rel_tol=1e-12)
    finer = loss_grid(LogNormalLevels(), 128)  # a cell's mass is that of its halves
    assert np.allclose(finer.mass.reshape(64, 2).sum(1), grid.mass, rtol=1e-9, atol=1e-15)


def test_heldout_loss_has_its_closed_form():
    """The best denoiser leaves E[(D - x)^2] = S^2 sigma^2 / (S^2 + sigma^2); with sigma_data = S the weight makes that 1."""
    x = S * torch.randn(20_000, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    grid = loss_grid(LogNormalLevels(), 8)
    loss = heldout_loss(optimal, x, None, grid, sigma_data=S, batch_size=20_000, seed=0)
    assert loss.shape == (8,)
    assert np.allclose(loss, 1, rtol=0.01)
    other = heldout_loss(optimal, x, None, grid, sigma_data=0.5, batch_size=20_000, seed=0)
    weights = (1 / 0.5**2 + 1 / grid.levels**2) / (1 / S**2 + 1 / grid.levels**2)
    assert np.allclose(other / loss, weights, rtol=1e-9)


def test_every_image_counts_alike_and_every_level_has_its_own_weight():
    """Errors that differ by image and by level: a weight broadcast over images would mix them."""
    offsets = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    x = torch.zeros(5, 1, 2, 2)
    grid = LossGrid(np.array([0.01, 1.0, 10.0]), np.array([0.2, 0.5, 0.3]))

    def denoise(z, sigma, labels):
        return (sigma * offsets[labels])[:, None, None, None].expand_as(z)

    loss = heldout_loss(denoise, x, torch.arange(5), grid, sigma_data=0.5, batch_size=2, seed=0)
    assert np.allclose(loss, 11 * (1 + grid.levels**2 / 0.25), rtol=1e-5)  # mean of offsets^2 is 11


def test_noise_is_the_same_for_every_batch_size():
    x, grid = torch.randn(50, 1, 4, 4), loss_grid(LogNormalLevels(), 4)
    seen = []

    def recording(z, sigma, labels):
        seen.append(z)
        return optimal(z, sigma, labels)

    whole, parts = (heldout_loss(recording, x, None, grid, sigma_data=S, batch_size=size, seed=3) for size in (50, 7))
    assert np.allclose(whole, parts, rtol=1e-12)
    assert torch.equal(torch.cat(seen[:4]), torch.cat(seen[4:]))
    assert not np.array_equal(whole, heldout_loss(optimal, x, None, grid, sigma_data=S, batch_size=50, seed=4))


@pytest.mark.parametrize("name", ["equi_probability", "log_uniform", "uniform"])
def test_contributions_of_blocks_sum_to_the_integral(name):
    distribution = LogNormalLevels()
    grid, partition = loss_grid(distribution, 64), make_partition(name, 3, distribution)
    loss = np.random.default_rng(0).uniform(0.1, 1, 64)
    summary = summarize_loss(loss, grid, [partition.block_of(level) for level in grid.levels])
    assert summary["integrated"] == sum(block["contribution"] for block in summary["blocks"])
    assert math.isclose(summary["integrated"], (grid.mass * loss).sum(), rel_tol=1e-12)
    assert math.isclose(summary["log_uniform"], loss.mean())
    assert sum(block["levels"] for block in summary["blocks"]) == 64
    assert math.isclose(sum(block["mass"] for block in summary["blocks"]), 1)
    constant = summarize_loss(np.full(64, 0.3), grid, [partition.block_of(level) for level in grid.levels])
    assert all(math.isclose(block["loss"], 0.3) for block in constant["blocks"])


def test_a_block_without_levels_has_no_loss():
    grid = LossGrid(np.array([0.1, 1.0]), np.array([0.4, 0.6]))
    blocks = summarize_loss(np.array([1.0, 2.0]), grid, [2, 0])["blocks"]
    assert [block["loss"] for block in blocks] == [2.0, None, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# Likelihood


def test_likelihood_has_its_closed_form_and_second_order():
    """The flow only stretches Gaussian data, by sqrt((S^2 + max^2) / (S^2 + min^2))."""
    low, high = 0.05, 20.0
    x = S * torch.randn(6, 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviation = high * math.sqrt((S**2 + low**2) / (S**2 + high**2))
    exact = torch.distributions.Normal(0, deviation).log_prob(x).flatten(1).sum(1).numpy()
    errors = []
    for steps in (40, 80, 160):
        likelihood = log_likelihood(optimal, x, None, karras_schedule(steps + 1, low, high), batch_size=4)
        errors.append(np.abs(likelihood.nats - exact).max())
        assert np.allclose(likelihood.bits_per_dimension, -likelihood.nats / 6 / math.log(2))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    assert errors[2] < 1e-2


def test_likelihood_takes_the_trace_of_a_full_jacobian_for_each_label():
    """Data N(0, C_label): D = C (C + sigma^2)^-1 z couples the dimensions."""
    low, high = 0.05, 200.0
    root = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 2
    eye = torch.eye(3, dtype=torch.float64)
    C = torch.stack([root @ root.T + 0.2 * eye, eye])  # (2, 3, 3)

    def denoise(z, sigma, labels):
        return (torch.linalg.solve(C + sigma**2 * eye, C)[labels] @ z[:, :, None])[:, :, 0]

    x, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])
    zero = torch.zeros(3, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(zero, C[labels] + low**2 * eye).log_prob(x)
    found = log_likelihood(denoise, x, labels, karras_schedule(201, low, high), batch_size=2)
    assert np.allclose(found.nats, exact, atol=0.01)


def test_likelihood_refuses_many_dimensions():
    with pytest.raises(SettingError, match=r"eval\.likelihood_images"):
        log_likelihood(optimal, torch.zeros(1, 1, 9, 9), None, np.array([0.1, 1.0]), batch_size=1)


# ---------------------------------------------------------------------------------------------------------------------
# Sample scores


def load(name: str, size: int, cache: Path) -> ImageData:
    columns = {"image_column": None, "label_column": None, "train_split": "train", "test_split": "test"}
    return load_images(name=name, path=None, size=size, flip=False, scale=None, sigma_data=0.5, cache=str(cache), **columns)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> ImageData:
    return load("digits", 8, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def floor(digits) -> dict:
    return floor_scores(digits, split="test", features="classifier")


def score(samples, data, labels=None):
    return sample_scores(samples, labels, data, split="test", features="classifier")


def choose(data: ImageData, keep: np.ndarray, number: int = 360) -> np.ndarray:
    """Training images among those to keep, classes alike."""
    kept = np.flatnonzero(keep)
    return data.train.images[kept[evaluation._stratified(data.train.labels[kept], number, 0)]]


def blurred(data):
    images = choose(data, data.train.labels >= 0)
    return gaussian_filter(images.astype(float), (0, 0, 0.5, 0.5)).round().astype(np.uint8)


def noisy(data):
    images = choose(data, data.train.labels >= 0)
    noise = np.random.default_rng(0).normal(0, 0.1 * 127.5, images.shape)
    return (images + noise).round().clip(0, 255).astype(np.uint8)


def half_of_each_class(data):
    """Without the half that lies farthest from the class mean."""
    images, labels = data.train.images.astype(float), data.train.labels
    keep = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        own = np.flatnonzero(labels == label)
        distance = ((images[own] - images[own].mean(0)) ** 2).sum((1, 2, 3))
        keep[own[np.argsort(distance)[: len(own) // 2]]] = True
    return choose(data, keep)


def one_class_less(data):
    return choose(data, data.train.labels != 3)


@pytest.mark.parametrize(("defect", "margin"), [(blurred, 20), (noisy, 2), (half_of_each_class, 1.7), (one_class_less, 1.7)])
def test_planted_defects_are_seen(defect, margin, digits, floor):
    """FID at least `margin` times that of real images.

    Measured: 42, 3.2, 2.3, 3.6; against the worst of five floors 33, 2.5, 1.8, 2.8.
    """
    assert score(defect(digits), digits)["scores"][FID] > margin * floor["scores"][FID]


def test_recall_sees_missing_halves_and_precision_does_not(digits, floor):
    scores = score(half_of_each_class(digits), digits)["scores"]
    assert scores["recall"] < floor["scores"]["recall"] - 0.05
    assert scores["precision"] > floor["scores"]["precision"]


def test_identical_sets_are_at_distance_zero(digits):
    scores = score(digits.test.images, digits, digits.test.labels)["scores"]
    assert abs(scores[FID]) < 1e-6
    assert scores["precision"] == scores["recall"] == 1
    assert scores["nearest_train_distance_mean"] == scores["heldout_nearest_train_distance_mean"] > 0.1


def test_metrics_are_those_of_torch_fidelity(digits):
    """The registered extractor gives the same numbers through torch-fidelity's own entry point."""
    samples = noisy(digits)
    result = score(samples, digits)
    direct = torch_fidelity.calculate_metrics(
        input1=evaluation._Images(samples, colour=False),
        input2=evaluation._Images(digits.test.images, colour=False),
        feature_extractor="classifier-digits",
        **dict.fromkeys(("fid", "kid", "isc", "prc"), True),
        **dict.fromkeys(("cuda", "cache", "verbose"), False),
        save_cpu_ram=True,
        kid_subset_size=360,
        rng_seed=evaluation.stream_seed(0, "fidelity") % 2**32,
    )
    assert direct == pytest.approx({name: result["scores"][name] for name in direct}, rel=1e-6)


def test_memorised_samples_are_seen(digits, floor):
    """A copy is at distance 0 and noise of .1 at about .1 (less where it is clipped); held-out images are much farther."""
    assert floor["scores"]["nearest_train_distance_mean"] == 0
    scores = score(noisy(digits), digits)["scores"]
    assert 0.05 < scores["nearest_train_distance_median"] < 0.5 * scores["heldout_nearest_train_distance_median"]
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 3, 3), dtype=np.uint8)
    every = np.sqrt(((images[:, None] / 127.5 - images[None] / 127.5) ** 2).mean((2, 3, 4)))
    assert np.allclose(nearest_train_distance(images[:2], images[2:]), every[:2, 2:].min(1), rtol=1e-5)


def test_label_accuracy_is_of_the_labels_asked_for(digits):
    images, labels = digits.test.images, digits.test.labels
    assert score(images, digits, labels)["scores"]["label_accuracy"] >= 0.98
    assert score(images, digits, (labels + 1) % 10)["scores"]["label_accuracy"] <= 0.02


def test_small_sets_are_scored_and_say_how(digits):
    few = replace(digits, test=Split(digits.test.images[:12], digits.test.labels[:12]), fingerprint="few")
    result = score(digits.train.images[:10], few)
    assert result["protocol"]["kid_subset_size"] == 10
    omitted = result["protocol"]["omitted"]
    assert set(omitted) == {"label_accuracy"} and result["scores"]["label_accuracy"] is None
    assert all(math.isfinite(value) for name, value in result["scores"].items() if name not in omitted)
    with pytest.raises(SettingError, match=r"sampler\.num_images=9"):
        score(digits.train.images[:9], few)


def test_protocol_is_complete(digits, floor):
    protocol = floor["protocol"]
    assert json.loads(json.dumps(floor)) == floor
    for key in (
        "features",
        "features_sha256",
        "labels_sha256",
        "num_samples",
        "num_reference",
        "split",
        "seed",
        "data_fingerprint",
    ):
        assert protocol[key] is not None
    for key in ("isc_splits", "kid_subsets", "kid_subset_size", "prc_neighborhood", "nearest_images", "torch_fidelity"):
        assert protocol[key]
    assert protocol["samples"] == "train images" and protocol["num_samples"] == protocol["num_reference"] == 360
    reverse = floor_scores(digits, split="train", features="classifier", num_samples=100)
    assert reverse["protocol"]["samples"] == "test images" and reverse["protocol"]["num_samples"] == 100
    assert reverse["scores"]["nearest_train_distance_mean"] > 0.1


def test_floor_repeats_by_seed(digits, floor):
    assert floor_scores(digits, split="test", features="classifier") == floor
    assert floor_scores(digits, split="test", features="classifier", seed=1)["scores"][FID] != floor["scores"][FID]


def test_a_choice_gives_each_class_its_share():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    index = evaluation._stratified(labels, 32, 0)
    assert len(set(index)) == 32
    assert np.abs(np.bincount(labels[index]) - np.array([20, 10, 2])).max() <= 1
    assert sorted(evaluation._stratified(labels, 1000, 0)) == list(range(160))


# ---------------------------------------------------------------------------------------------------------------------
# Inception, with random weights


def test_inception_scores_colour_and_grey_images(inception_weights, digits, monkeypatch):
    monkeypatch.setattr(evaluation, "INCEPTION_SHA256", evaluation.checksum(inception_weights))
    grey = Split(digits.train.images[:10], digits.train.labels[:10])
    colour = replace(grey, images=np.repeat(grey.images, 3, axis=1))
    results = []
    for name, split in (("grey", grey), ("colour", colour)):
        data = replace(digits, name="image_folder", train=split, test=split, fingerprint=name)
        settings = {"split": "test", "features": "inception-v3-compat", "inception_weights": inception_weights}
        results.append(sample_scores(split.images, split.labels, data, **settings))
    assert results[0]["scores"] == results[1]["scores"]
    assert results[0]["protocol"]["features_sha256"] == evaluation.checksum(inception_weights)
    assert results[0]["protocol"]["omitted"] == {"label_accuracy": "there is no classifier for image_folder"}


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def check(name="digits", shape=(1, 8, 8), features="classifier", inception_weights=None, num_samples=360):
    check_scores(name, shape, features=features, inception_weights=inception_weights, num_samples=num_samples)


def test_what_can_be_scored_passes():
    check()
    check("fashion_mnist", (1, 28, 28))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"features": "vgg"}, "eval.features=vgg"),
        ({"name": "cifar10", "shape": (3, 32, 32)}, "eval.features=classifier .* not for cifar10"),
        ({"shape": (1, 16, 16)}, "1x8x8 for digits, these are 1x16x16"),
        ({"num_samples": 9}, "sampler.num_images=9"),
        ({"inception_weights": "w.pth"}, "eval.inception_weights=w.pth belongs to"),
        ({"features": "inception-v3-compat", "inception_weights": "/nowhere/w.pth"}, "eval.inception_weights=/nowhere/w.pth"),
        ({"features": "inception-v3-compat", "shape": (4, 32, 32)}, "1 or 3 channels"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(wrong, named):
    with pytest.raises(SettingError, match=named) as refusal:
        check(**wrong)
    assert "\n" not in str(refusal.value)


def test_no_network_for_inception_is_found_beforehand(tmp_path, monkeypatch):
    def no_network(url, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(evaluation.urllib.request, "urlopen", no_network)
    with pytest.raises(SettingError, match=r"cannot be downloaded .* eval\.inception_weights"):
        check("cifar10", (3, 32, 32), features="inception-v3-compat")


def test_other_files_than_inceptions_weights_are_refused(inception_weights, tmp_path):
    with pytest.raises(SettingError, match="another file"):
        check("cifar10", (3, 32, 32), features="inception-v3-compat", inception_weights=inception_weights)
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(SettingError, match="not a file of weights"):
        check("cifar10", (3, 32, 32), features="inception-v3-compat", inception_weights=tmp_path / "text.pth")


def test_samples_of_another_shape_are_refused(digits):
    with pytest.raises(SettingError, match="cannot be scored"):
        score(np.zeros((20, 1, 9, 9), dtype=np.uint8), digits)
    with pytest.raises(SettingError, match=r"eval\.split=dev"):
        sample_scores(digits.test.images, None, digits, split="dev", features="classifier")


# ---------------------------------------------------------------------------------------------------------------------
# The committed classifiers


@pytest.mark.parametrize("name", features.SIZES)
def test_committed_weights_are_small_and_of_two_kinds(name):
    paths = [features.weights_path(name, role) for role in ("features", "labels")]
    assert all(path.stat().st_size < 320_000 for path in paths)
    extractor, second = (load_file(path) for path in paths)
    assert {key: value.shape for key, value in extractor.items()} != {key: value.shape for key, value in second.items()}
    (_, made), (_, made_second) = (features.load_network(name, role) for role in ("features", "labels"))
    assert made["seed"] != made_second["seed"]
    assert made_second["test_accuracy"] >= {"digits": 0.98, "fashion_mnist": 0.90}[name]
    assert extractor["mean"].numel() <= 64


@pytest.mark.parametrize("role", features.ROLES)
def test_committed_weights_have_the_accuracy_that_they_claim(role, digits):
    network, made = features.load_network("digits", role)
    assert made["data_fingerprint"] == digits.fingerprint
    images, labels = torch.tensor(digits.test.images), torch.tensor(digits.test.labels)
    assert accuracy(network, role, images, labels) == pytest.approx(made["test_accuracy"], abs=1 / len(labels))


def test_features_are_scaled_alike(digits):
    network, _ = features.load_network("digits", "features")
    found, logits = network(torch.tensor(digits.train.images))
    assert found.shape == (1437, 48) and logits.shape == (1437, 10)
    assert torch.allclose(found.mean(0), torch.zeros(48), atol=1e-4)
    assert torch.allclose(found.std(0), torch.ones(48), atol=1e-3)


def test_wrong_weights_are_refused(tmp_path):
    swapped = features.weights_path("digits", "labels")
    with pytest.raises(SettingError, match="were made for"):
        features.load_network("digits", "features", swapped)
    path = tmp_path / "planted.safetensors"
    with safe_open(features.weights_path("digits", "features"), framework="pt") as file:
        metadata = file.metadata()
    save_file({"head.weight": torch.zeros(10, 3)}, path, metadata=metadata)
    with pytest.raises(SettingError, match="do not fit FeatureNet"):
        features.load_network("digits", "features", path)
    path.write_bytes(b"planted")
    with pytest.raises(SettingError, match="cannot be read"):
        features.load_network("digits", "features", path)
    with pytest.raises(SettingError, match="cannot be read"):
        features.load_network("digits", "features", tmp_path / "missing.safetensors")


def test_translation_moves_images_whole():
    images = torch.zeros(200, 1, 5, 5, dtype=torch.uint8)
    images[:, 0, 2, 2] = 9
    moved = translate(images, 1, torch.Generator().manual_seed(0))
    assert torch.equal(moved.flatten(1).sum(1), torch.full((200,), 9))
    assert {tuple(place.tolist()) for place in moved[:, 0].nonzero()[:, 1:]} == {(r, c) for r in (1, 2, 3) for c in (1, 2, 3)}


# ---------------------------------------------------------------------------------------------------------------------
# What goes beside a number


def test_environment_names_versions_and_commit(tmp_path):
    found = environment()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() and found["cpu"]
    assert hardware._commit(tmp_path) is None


def test_repeats_are_summarised():
    assert repeat_summary([3.0]) == {"value": 3.0, "minimum": 3.0, "mean": 3.0, "spread": None, "count": 1}
    summary = repeat_summary([3.0, 1.0, 2.0])
    assert summary == {"value": 3.0, "minimum": 1.0, "mean": 2.0, "spread": 1.0, "count": 3}
