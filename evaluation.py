"""Scores: held-out loss and likelihood, which need no features, and torch-fidelity's metrics, each with its protocol.

A number says nothing without how it was measured, so `sample_scores` returns both: {"scores": ..., "protocol": ...}. Scores
whose protocols differ do not belong in one column. What cannot be computed is None, and `omitted` in the protocol says why.
"""

import importlib.metadata
import math
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY
from torch_fidelity.utils import create_feature_extractor, get_featuresdict_from_dataset

import features as networks
from config import SettingError, require
from data import ImageData, Split
from dblock_modules import LevelDistribution, edm_weight
from files import checksum
from randomness import generator, stream_seed

# D(z, sigma, labels), shaped like z (N, ...); labels (N,) int64, or None where the data have none
Denoise = Callable[[Tensor, float, Tensor | None], Tensor]

MAX_DIMENSIONS = 64  # the exact divergence costs a Jacobian-vector product per dimension and step
LIKELIHOOD_PROTOCOL = {
    "density": "of the images plus noise of sigma_min, in model units",
    "prior": "N(0, sigma_max^2)",
    "solver": "heun",
    "divergence": "exact",
}

FEATURES = ("classifier", "inception-v3-compat")
ISC_SPLITS, KID_SUBSETS, PRC_NEIGHBORHOOD = 10, 100, 3  # torch-fidelity's defaults, written into every protocol
INCEPTION_SHA256 = "6726825d"  # how the checksum begins: torch-fidelity names the file by it
NETWORK_TIMEOUT = 10  # seconds
REFERENCE_FEATURES = 50_000  # of a reference split, whose features KID, precision and recall take; FID's moments are of all
REFERENCE_CHUNK = 10_000  # images of a larger split that are looked at together
NEAREST_IMAGES = 1000  # images whose nearest training image is looked for
NEAREST_PIXELS = 2**30  # a larger training split is not searched: it would take longer than the sampling


# ---------------------------------------------------------------------------------------------------------------------
# Held-out loss


@dataclass(frozen=True)
class LossGrid:
    """Levels on which the held-out loss is measured.

    Attributes:
        levels: (L,) float64, ascending: centres of L cells of equal width in log sigma that fill [sigma_min, sigma_max].
        mass: (L,) float64: the training distribution's share of each cell; sums to 1.
    """

    levels: np.ndarray
    mass: np.ndarray


def loss_grid(distribution: LevelDistribution, num_levels: int) -> LossGrid:
    """Returns the grid with that many levels: sum(mass * loss) is the loss in training, mean(loss) that of log-uniform levels."""
    edges = np.geomspace(distribution.minimum, distribution.maximum, num_levels + 1)
    mass = np.diff(distribution.cdf(torch.from_numpy(edges)).numpy())
    return LossGrid(np.sqrt(edges[:-1] * edges[1:]), mass)


def _batches(count: int, batch_size: int) -> list[slice]:
    return [slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]


@torch.no_grad()
def heldout_loss(
    denoise: Denoise, x: Tensor, labels: Tensor | None, grid: LossGrid, *, sigma_data: float, batch_size: int, seed: int
) -> np.ndarray:
    """Returns EDM's weighted denoising loss at every level of the grid, (L,) float64: mean over images and dimensions.

    The noise of level j comes from the stream (seed, "heldout", j), drawn on the CPU for all images at once: every model meets
    the same noise, at any batch size.

    Args:
        x: held-out images (N, ...) in model units.
        labels: (N,) or None.
    """
    loss = np.zeros(len(grid.levels))
    for j, sigma in enumerate(grid.levels.tolist()):
        noise = torch.randn(x.shape, generator=generator(seed, "heldout", j)).to(x.device)
        for batch in _batches(len(x), batch_size):
            denoised = denoise(x[batch] + sigma * noise[batch], sigma, None if labels is None else labels[batch])
            loss[j] += (denoised.double() - x[batch]).square().flatten(1).mean(1).sum().item()
        loss[j] *= edm_weight(torch.tensor(sigma, dtype=torch.float64), sigma_data).item() / len(x)
    return loss


def summarize_loss(loss: np.ndarray, grid: LossGrid, owners: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Integrates the loss over the levels, in all and by block.

    Args:
        loss: (L,), see `heldout_loss`.
        owners: (L,), the block that owns each level of the grid.

    Returns:
        `integrated` (under the training distribution) and `log_uniform` (all levels alike), and for each block its number of
        levels, the mass of their cells, the mean loss over that mass (None without levels), and the contribution
        mass * loss; the contributions sum to `integrated` exactly. A cell belongs whole to its centre's owner.
    """
    owners = np.asarray(owners)
    blocks = []
    for block in range(owners.max() + 1):
        own = owners == block
        mass, contribution = float(grid.mass[own].sum()), float((grid.mass[own] * loss[own]).sum())
        mean = contribution / mass if mass > 0 else None
        blocks.append({"block": block, "levels": int(own.sum()), "mass": mass, "loss": mean, "contribution": contribution})
    return {"integrated": sum(block["contribution"] for block in blocks), "log_uniform": float(loss.mean()), "blocks": blocks}


# ---------------------------------------------------------------------------------------------------------------------
# Likelihood


class Likelihood(NamedTuple):
    """Per image, float64 (N,): the log-density in nats, and minus it in bits per dimension. Both in model units."""

    nats: np.ndarray
    bits_per_dimension: np.ndarray


def log_likelihood(denoise: Denoise, x: Tensor, labels: Tensor | None, schedule: np.ndarray, *, batch_size: int) -> Likelihood:
    """Integrates the probability-flow ODE from sigma_min up to sigma_max with its exact divergence.

    d log p / d sigma = -div f along dz / d sigma = f = (z - D) / sigma, so that
    log p(x) = log N(z_max; 0, sigma_max^2) + integral of div f. Heun's steps; state and sums in float64.

    The images are taken for a draw of the model's density at sigma_min, without dequantisation: clean pixels are scored as if
    they carried that noise, so the number compares models on the same data, not with other papers. The prior leaves out the
    data's own mean and variance at sigma_max, as the sampler does: this is the density of what the sampler draws.

    Args:
        denoise: differentiable in z.
        x: images (N, ...) in model units, at most 64 dimensions.
        labels: (N,) or None.
        schedule: the levels that are visited, in either order; ends are sigma_min and sigma_max.

    Raises:
        SettingError: more than 64 dimensions.

    Source: Song et al., arXiv 2011.13456, equation 39.
    """
    dimensions = x[0].numel()
    require(
        dimensions <= MAX_DIMENSIONS,
        f"eval.likelihood_images must be 0 for data of {dimensions} dimensions: the likelihood takes at most {MAX_DIMENSIONS}",
    )
    levels = np.sort(schedule).tolist()
    nats = [
        _log_likelihood(denoise, x[batch].double(), None if labels is None else labels[batch], levels).cpu()
        for batch in _batches(len(x), batch_size)
    ]
    nats = torch.cat(nats).numpy()
    return Likelihood(nats, -nats / (dimensions * math.log(2)))


def _log_likelihood(denoise: Denoise, z: Tensor, labels: Tensor | None, levels: list[float]) -> Tensor:
    """Returns log p of a batch, (N,) float64, for ascending levels."""
    volume = torch.zeros(len(z), dtype=torch.float64, device=z.device)  # integral of the divergence
    for sigma, following in zip(levels[:-1], levels[1:], strict=True):
        step = following - sigma
        slope, divergence = _flow(denoise, z, sigma, labels)
        slope_ahead, divergence_ahead = _flow(denoise, z + step * slope, following, labels)
        z = z + step * (slope + slope_ahead) / 2
        volume += step * (divergence + divergence_ahead) / 2
    prior = torch.distributions.Normal(0.0, levels[-1]).log_prob(z).flatten(1).sum(1)
    return prior + volume


@torch.enable_grad()
def _flow(denoise: Denoise, z: Tensor, sigma: float, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns dz / d sigma, (N, ...), and its divergence, (N,), one Jacobian-vector product per dimension."""
    z = z.detach().requires_grad_()
    denoised = denoise(z, sigma, labels).double().flatten(1)  # (N, D)
    trace = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    for i in range(denoised.shape[1]):
        (row,) = torch.autograd.grad(denoised[:, i].sum(), z, retain_graph=True)
        trace += row.flatten(1)[:, i]
    slope = (z.detach() - denoised.detach().reshape(z.shape)) / sigma
    return slope, (denoised.shape[1] - trace) / sigma


# ---------------------------------------------------------------------------------------------------------------------
# Sample scores


class _Images(Dataset):
    """uint8 images (N, C, H, W) as the bare tensors that torch-fidelity asks for; grey is repeated where it needs colour."""

    def __init__(self, images: np.ndarray, colour: bool) -> None:
        self.images = images
        self.repeats = 3 if colour and images.shape[1] == 1 else 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self.images[index])).repeat(self.repeats, 1, 1)  # (C, H, W)


@dataclass(frozen=True)
class _Extractor:
    """A feature extractor of torch-fidelity by its registered name, and the file that its weights are read from."""

    name: str
    weights: Path
    sha256: str

    def layer(self, metric: str) -> str:
        return FEATURE_EXTRACTORS_REGISTRY[self.name].get_default_feature_layer_for_metric(metric)

    def __call__(self, images: np.ndarray, batch_size: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the features of uint8 images (N, C, H, W) by layer, float32 (N, D) on the CPU."""
        cuda = device.type == "cuda"
        layers = sorted({self.layer("isc"), self.layer("fid")})
        path = str(self.weights)
        network = create_feature_extractor(self.name, layers, cuda, feature_extractor_weights_path=path, verbose=False)
        dataset = _Images(images, colour=self.name == "inception-v3-compat")
        return get_featuresdict_from_dataset(dataset, network, batch_size, cuda, save_cpu_ram=True, verbose=False)


class _Reference(NamedTuple):
    """What samples are scored against.

    Attributes:
        features: float32 (n, D), of the whole split or, of a larger one, of REFERENCE_FEATURES of its images.
        mu, sigma: mean (D,) and covariance (D, D) of the features of the whole split, float64.
    """

    features: np.ndarray
    mu: np.ndarray
    sigma: np.ndarray


# References that were computed before, in this process. torch-fidelity's cache on disk knows neither data nor weights, and
# unpickles what it finds; this one's key knows both, and so do the names of the files that ImageData.statistics holds.
_references: dict[tuple[str, ...], _Reference] = {}


def _reference(extractor: _Extractor, data: ImageData, split: str, batch_size: int, device: torch.device) -> _Reference:
    """Returns what samples are scored against, computed once per process, or once for all where the data keep it."""
    key = (data.fingerprint, split, extractor.name, extractor.sha256, device.type)
    if key in _references:
        return _references[key]
    if data.statistics is None:
        _references[key] = _compute_reference(extractor, data, split, batch_size, device)
        return _references[key]
    name = "_".join([split, extractor.name, extractor.sha256[:8], data.fingerprint[:16], device.type])
    file = data.statistics / f"{name}.npz"
    if not file.exists():
        data.statistics.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp.npz")
        np.savez(temporary, **_compute_reference(extractor, data, split, batch_size, device)._asdict())
        temporary.replace(file)
    with np.load(file, allow_pickle=False) as kept:
        _references[key] = _Reference(**kept)
    return _references[key]


def _compute_reference(extractor: _Extractor, data: ImageData, split: str, batch_size: int, device: torch.device) -> _Reference:
    part, layer = _split(data, split), extractor.layer("fid")
    if len(part.labels) <= REFERENCE_FEATURES:
        features = extractor(part.images, batch_size, device)[layer]
        moments = fid_features_to_statistics(features)
        return _Reference(features.numpy(), moments["mu"], moments["sigma"])
    return _reference_by_chunks(part, lambda images: extractor(images, batch_size, device)[layer].numpy(), REFERENCE_FEATURES)


def _reference_by_chunks(part: Split, extract: Callable[[np.ndarray], np.ndarray], number: int) -> _Reference:
    """Returns the moments of a split whose features would fill the memory, and the features of `number` of its images."""
    chosen = set(_stratified(part.labels, number, seed=0).tolist())
    kept, total, products = [], 0.0, 0.0
    for start in range(0, len(part.labels), REFERENCE_CHUNK):
        stop = min(start + REFERENCE_CHUNK, len(part.labels))
        features = extract(part.images[start:stop])
        kept.append(features[[index - start for index in range(start, stop) if index in chosen]])
        features = features.astype(np.float64)
        total += features.sum(0)
        products += features.T @ features
    count, mu = len(part.labels), total / len(part.labels)
    kept = np.concatenate(kept)
    return _Reference(kept, mu.astype(kept.dtype), (products - count * np.outer(mu, mu)) / (count - 1))


def _split(data: ImageData, name: str) -> Split:
    return {"train": data.train, "test": data.test}[name]


def _inception_file(path: str | Path | None) -> Path:
    """Returns the file of Inception's weights, downloaded into torch hub's cache where no path is given and it is not there.

    Raises:
        SettingError: a missing or wrong file, or no network.
    """
    if path is not None:
        file = Path(path).expanduser()
        require(file.is_file(), f"eval.inception_weights={path} is not a file: give the path of {Path(URL_INCEPTION_V3).name}")
    else:
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(URL_INCEPTION_V3).name
        if not file.is_file():
            _download_inception(file)
    try:  # torch-fidelity unpickles the file without restraint, so it must first pass the loader that runs no code
        torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise SettingError(f"eval.inception_weights: {file} is not a file of weights: fetch {URL_INCEPTION_V3}") from error
    require(
        checksum(file).startswith(INCEPTION_SHA256),
        f"eval.inception_weights: {file} is another file than torch-fidelity's: fetch {URL_INCEPTION_V3}",
    )
    return file


def _download_inception(file: Path) -> None:
    try:
        urllib.request.urlopen(URL_INCEPTION_V3, timeout=NETWORK_TIMEOUT).close()  # the download itself would wait for minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(URL_INCEPTION_V3, str(file), hash_prefix=INCEPTION_SHA256)
    except (OSError, RuntimeError) as error:
        raise SettingError(
            f"eval.features=inception-v3-compat needs weights that cannot be downloaded ({error}): "
            f"fetch {URL_INCEPTION_V3} and set eval.inception_weights to its path"
        ) from error


def _extractor(data_name: str, shape: tuple[int, int, int], features: str, inception_weights: str | Path | None) -> _Extractor:
    """Returns the extractor that scores images (C, H, W) of a data set; its weights were found and read.

    Raises:
        SettingError: unknown features, or features that this data set or machine does not have.
    """
    channels, height, width = shape
    require(features in FEATURES, f"eval.features={features} is not one of {', '.join(FEATURES)}")
    if features == "inception-v3-compat":
        require(channels in (1, 3), f"eval.features={features} takes images of 1 or 3 channels, these have {channels}")
        weights = _inception_file(inception_weights)
        return _Extractor(features, weights, checksum(weights))
    require(inception_weights is None, f"eval.inception_weights={inception_weights} belongs to eval.features=inception-v3-compat")
    require(
        data_name in networks.SIZES,
        f"eval.features=classifier is there for {' and '.join(networks.SIZES)}, not for {data_name}: set "
        "eval.features=inception-v3-compat",
    )
    size = networks.SIZES[data_name]
    require(
        shape == (1, size, size),
        f"eval.features=classifier takes images of 1x{size}x{size} for {data_name}, these are {channels}x{height}x{width}",
    )
    for role in networks.ROLES:
        networks.load_network(data_name, role)
    weights = networks.weights_path(data_name, "features")
    return _Extractor(f"classifier-{data_name}", weights, checksum(weights))


def check_scores(
    data_name: str, shape: tuple[int, int, int], *, features: str, inception_weights: str | Path | None, num_samples: int
) -> None:
    """Refuses, before any training or sampling, sample scores that could not be computed afterwards.

    Fetches Inception's weights if they are asked for and not on this machine.

    Args:
        data_name: as in data.name.
        shape: (C, H, W) of a sample.
        features: a name of FEATURES.
        inception_weights: path of Inception's weights; None: torch hub's cache.
        num_samples: how many samples will be scored.

    Raises:
        SettingError: unknown or missing features, images of another shape, weights that cannot be had, too few samples.
    """
    _require_enough(num_samples)
    _extractor(data_name, shape, features, inception_weights)


def _require_enough(num_samples: int) -> None:
    """Inception Score's splits need the most; precision, recall and FID are content with fewer."""
    require(
        num_samples >= ISC_SPLITS,
        f"sampler.num_images={num_samples} is too few for sample scores: draw at least {ISC_SPLITS}, or set eval.features=null",
    )


def sample_scores(
    samples: np.ndarray,
    labels: np.ndarray | None,
    data: ImageData,
    *,
    split: str,
    features: str,
    inception_weights: str | Path | None = None,
    kid_subset_size: int = 1000,
    batch_size: int = 500,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Scores samples against a split of the data.

    All of torch-fidelity's metrics use the same extractor, precision and recall included (its own default for these two is
    VGG16). KID's subsets are made as small as the smaller of the two sets; where they are all of it, KID's deviation is 0.

    Args:
        samples: uint8 (N, C, H, W), at least 10.
        labels: (N,), what each sample was asked to be; None if nothing was asked.
        data: what the samples imitate.
        split: reference images, `train` or `test`.
        features: a name of FEATURES.
        inception_weights: path of Inception's weights; None: torch hub's cache.
        seed: of the subsets that Inception Score, KID and the nearest distances draw.

    Returns:
        `scores`: torch-fidelity's metrics under its own names, `label_accuracy`, and the mean and median distance from samples
        and from held-out images to their nearest training image (root mean square over pixels in [-1, 1]); None for what
        cannot be computed.
        `protocol`: everything that defines them, with `omitted` saying why a score is None.

    Raises:
        SettingError: as `check_scores`.
    """
    require(split in ("train", "test"), f"eval.split={split} is not one of train, test")
    reference = _split(data, split)
    shape = reference.images.shape[1:]
    require(samples.shape[1:] == shape, f"samples of shape {samples.shape[1:]} cannot be scored against images of {shape}")
    _require_enough(len(samples))
    require(
        len(reference.images) > PRC_NEIGHBORHOOD,
        f"eval.split={split} has {len(reference.images)} images, too few to score against: use the other split",
    )
    device = torch.device(device)
    extractor = _extractor(data.name, shape, features, inception_weights)
    kid_subset_size = min(kid_subset_size, len(samples), len(reference.images))
    generated = extractor(samples, batch_size, device)
    real = _reference(extractor, data, split, batch_size, device)
    values = {
        **_fidelity(extractor, generated, real, kid_subset_size, stream_seed(seed, "fidelity") % 2**32),
        **_label_accuracy(samples, labels, data.name, batch_size),
        **_nearest_distances(samples, data, device, seed),
    }
    omitted = {name: value for name, value in values.items() if isinstance(value, str)}
    omitted |= {name: "not a finite number" for name, value in values.items() if name not in omitted and not math.isfinite(value)}
    protocol = {
        "samples": "generated",
        "num_samples": len(samples),
        "data": data.name,
        "data_fingerprint": data.fingerprint,
        "split": split,
        "num_reference": len(reference.images),
        **({"num_reference_features": len(real.features)} if len(real.features) < len(reference.images) else {}),
        "features": features,
        "features_sha256": extractor.sha256,
        "features_layer": extractor.layer("fid"),
        "features_device": device.type,
        "labels_sha256": None if "label_accuracy" in omitted else checksum(networks.weights_path(data.name, "labels")),
        "isc_splits": ISC_SPLITS,
        "kid_subsets": KID_SUBSETS,
        "kid_subset_size": kid_subset_size,
        "prc_neighborhood": PRC_NEIGHBORHOOD,
        "nearest_images": min(len(samples), NEAREST_IMAGES),
        "seed": seed,
        "torch_fidelity": importlib.metadata.version("torch-fidelity"),
        "omitted": omitted,
    }
    return {"scores": {name: None if name in omitted else value for name, value in values.items()}, "protocol": protocol}


def floor_scores(
    data: ImageData,
    *,
    split: str,
    features: str,
    num_samples: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Scores real images against a split as if they were samples: what a perfect model would get, and every table prints.

    The images come from the other split, so that train images are scored against test images. Their distance to the nearest
    training image is then 0: that of perfect memorisation. The choice matters: over seeds FID's floor went from .50 to .65 for
    360 digits and from .09 to .26 for 1,000 images of Fashion-MNIST.

    Args:
        num_samples: as many as the samples beside which the floor is printed, since FID falls with their number; None: as many
            as the reference. Never more than there are.
        seed: of the choice, in which classes have their share.
        settings: the others of `sample_scores`.

    Returns:
        As `sample_scores`; the protocol's `samples` says which images were scored.
    """
    other = "train" if split == "test" else "test"
    source = _split(data, other)
    index = _stratified(source.labels, num_samples or len(_split(data, split).images), seed)
    images, labels = source.images[index], source.labels[index]
    result = sample_scores(images, labels, data, split=split, features=features, seed=seed, **settings)
    result["protocol"]["samples"] = f"{other} images"
    return result


def _fidelity(
    extractor: _Extractor, generated: dict[str, Tensor], real: _Reference, kid_subset_size: int, rng_seed: int
) -> dict[str, float]:
    """Returns torch-fidelity's metrics, by its names, of features by layer."""
    ours, theirs = generated[extractor.layer("fid")], torch.from_numpy(real.features)  # (N, D), (M, D)
    moments = fid_features_to_statistics(ours), {"mu": real.mu, "sigma": real.sigma}
    kid = {"kid_subsets": KID_SUBSETS, "kid_subset_size": kid_subset_size, "rng_seed": rng_seed, "verbose": False}
    prc = {"prc_neighborhood": PRC_NEIGHBORHOOD, "save_cpu_ram": True, "verbose": False}
    return {
        **fid_statistics_to_metric(*moments, verbose=False),
        **kid_features_to_metric(ours, theirs, **kid),
        **isc_features_to_metric(generated[extractor.layer("isc")], ISC_SPLITS, rng_seed=rng_seed),
        **prc_features_to_metric(ours, theirs, **prc),
    }


@torch.no_grad()
def _label_accuracy(samples: np.ndarray, labels: np.ndarray | None, data_name: str, batch_size: int) -> dict[str, float | str]:
    """Returns the share of samples that the second classifier takes for what was asked, or why there is none."""
    if labels is None:
        return {"label_accuracy": "the samples were not asked to be of a class"}
    if data_name not in networks.SIZES:
        return {"label_accuracy": f"there is no classifier for {data_name}"}
    network, _ = networks.load_network(data_name, "labels")
    predicted = torch.cat([network(torch.from_numpy(np.array(samples[batch]))) for batch in _batches(len(samples), batch_size)])
    return {"label_accuracy": float((predicted.argmax(1).numpy() == labels).mean())}


def _nearest_distances(samples: np.ndarray, data: ImageData, device: torch.device, seed: int) -> dict[str, float | str]:
    """Returns how far samples, and held-out images beside them, lie from the training images, or why that is not known."""
    names = "nearest_train_distance", "heldout_nearest_train_distance"
    if data.train.images.size > NEAREST_PIXELS:
        too_large = "the training split is too large to search"
        return {f"{name}_{summary}": too_large for name in names for summary in ("mean", "median")}
    held_out = data.test.images[_stratified(data.test.labels, NEAREST_IMAGES, seed)]
    chosen = samples[_stratified(np.zeros(len(samples)), NEAREST_IMAGES, seed)]
    distances: dict[str, float | str] = {}
    for name, images in zip(names, (chosen, held_out), strict=True):
        found = nearest_train_distance(images, data.train.images, device)
        distances |= {f"{name}_mean": float(found.mean()), f"{name}_median": float(np.median(found))}
    return distances


def nearest_train_distance(images: np.ndarray, train_images: np.ndarray, device: torch.device | str = "cpu") -> np.ndarray:
    """Returns each image's distance to its nearest training image, (N,): root mean square over pixels in [-1, 1].

    Args:
        images: uint8 (N, C, H, W); train_images: uint8 (M, C, H, W).
    """
    wanted = networks.to_unit(torch.from_numpy(np.array(images))).flatten(1).to(device)  # (N, D)
    nearest = torch.full((len(wanted),), torch.inf, device=device)
    for batch in _batches(len(train_images), 4096):
        known = networks.to_unit(torch.from_numpy(np.array(train_images[batch]))).flatten(1).to(device)  # (m, D)
        closest = known[torch.cdist(wanted, known).argmin(1)]  # (N, D)
        # Once more without cdist's matrix product, whose rounding hides that a copy is at distance 0.
        nearest = nearest.minimum((wanted - closest).square().mean(1).sqrt())
    return nearest.cpu().numpy()


def _stratified(labels: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Returns `number` indices (all, if there are fewer) in which each class has its share, drawn by seed."""
    order = torch.randperm(len(labels), generator=generator(seed, "stratified")).numpy()
    position = np.zeros(len(labels))  # of each image within its class, from 0 to 1
    for label in np.unique(labels):
        own = order[labels[order] == label]
        position[own] = (np.arange(len(own)) + 0.5) / len(own)
    return order[np.argsort(position[order], kind="stable")][:number]


# ---------------------------------------------------------------------------------------------------------------------
# What goes beside a number


def repeat_summary(values: Sequence[float]) -> dict[str, Any]:
    """Summarises a score over repeats: the first value, minimum, mean, sample standard deviation (None for one), count."""
    return {
        "value": values[0],
        "minimum": min(values),
        "mean": statistics.fmean(values),
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "count": len(values),
    }
