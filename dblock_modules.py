"""The mathematics of DiffusionBlocks: levels, partitions, overlap, routing, schedules, preconditioning.

Pure functions of float64 numbers; nothing here has parameters. Symbols are the paper's (arXiv 2506.14202, v4) and EDM's
(arXiv 2206.00364). A level says how noisy a sample is; for Gaussian noise it is sigma. Blocks count from the noisiest, so
edges decrease: block b covers [edges[b + 1], edges[b]].
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import scipy.special
import torch
from torch import Tensor

# A level may reach the router in float32 (relative rounding 6e-8) or by another formula; one part in a million covers both,
# and no schedule places two levels that close.
EDGE_TOLERANCE = 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Level distributions


class LevelDistribution(Protocol):
    """What a distribution of training levels offers: bounds, a cdf onto [0, 1] and its inverse.

    Both functions take and return float64 tensors of any shape, on any device that has float64.
    """

    minimum: float
    maximum: float

    def cdf(self, level: Tensor) -> Tensor: ...

    def inverse_cdf(self, q: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LogNormalLevels:
    """EDM's noise distribution, ln sigma ~ N(P_mean, P_std^2), truncated to [minimum, maximum].

    Source: EDM table 1 (training distribution); DiffusionBlocks section 3.3 (truncation).
    """

    P_mean: float = -1.2
    P_std: float = 1.2
    minimum: float = 0.002
    maximum: float = 80.0

    @functools.cached_property
    def _bounds(self) -> tuple[float, float]:
        z = (torch.tensor([self.minimum, self.maximum], dtype=torch.float64).log() - self.P_mean) / self.P_std
        q_min, q_max = torch.special.ndtr(z).tolist()
        return q_min, q_max

    @property
    def share(self) -> float:
        """How much of the untruncated distribution lies between the bounds."""
        q_min, q_max = self._bounds
        return q_max - q_min

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the truncated distribution below `level`: 0 at minimum, 1 at maximum."""
        q_min, q_max = self._bounds
        z = (torch.as_tensor(level, dtype=torch.float64).log() - self.P_mean) / self.P_std
        return ((torch.special.ndtr(z) - q_min) / (q_max - q_min)).clamp(0.0, 1.0)

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns Q(q), the level below which the share q of the truncated distribution lies (q in [0, 1])."""
        q_min, q_max = self._bounds
        q = torch.as_tensor(q, dtype=torch.float64)
        z = torch.special.ndtri(q_min + q * (q_max - q_min))
        return (self.P_mean + self.P_std * z).exp().clamp(self.minimum, self.maximum)


@dataclass(frozen=True)
class UniformLevels:
    """Levels spread evenly over [minimum, maximum]."""

    minimum: float = 0.0
    maximum: float = 1.0

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution below `level`: 0 at minimum, 1 at maximum."""
        return ((torch.as_tensor(level, dtype=torch.float64) - self.minimum) / (self.maximum - self.minimum)).clamp(0.0, 1.0)

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the level below which the share q lies (q in [0, 1])."""
        return self.minimum + torch.as_tensor(q, dtype=torch.float64) * (self.maximum - self.minimum)


@dataclass(frozen=True)
class LogitNormalLevels:
    """Levels of flow matching with logit(level) ~ N(mean, std^2), on [0, 1]; 1 is noise, so a higher mean trains more noise.

    Source: Stable Diffusion 3, arXiv 2403.03206, equation 19.
    """

    mean: float = 0.0
    std: float = 1.0
    minimum: float = 0.0
    maximum: float = 1.0

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution below `level`."""
        return torch.special.ndtr((torch.logit(torch.as_tensor(level, dtype=torch.float64)) - self.mean) / self.std)

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the level below which the share q lies (q in [0, 1])."""
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(torch.as_tensor(q, dtype=torch.float64)))


@dataclass(frozen=True)
class ModeLevels:
    """Levels of flow matching with heavy tails, on [0, 1]: level = 1 - u - scale (cos^2(pi u / 2) - 1 + u), u uniform.

    Source: Stable Diffusion 3, arXiv 2403.03206, equation 20; it rises in 1 - u for scales in [-1, 2 / (pi - 2)].
    """

    scale: float = 1.29
    minimum: float = 0.0
    maximum: float = 1.0

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution below `level`; there is no closed form, so by bisection to float64's end."""
        level = torch.as_tensor(level, dtype=torch.float64)
        low, high = torch.zeros_like(level), torch.ones_like(level)
        for _ in range(54):
            middle = (low + high) / 2
            below = self.inverse_cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.where(level >= self.maximum, 1.0, torch.where(level <= self.minimum, 0.0, (low + high) / 2))

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the level below which the share q = 1 - u lies (q in [0, 1])."""
        q = torch.as_tensor(q, dtype=torch.float64)
        return (q - self.scale * (torch.sin(torch.pi * q / 2) ** 2 - q)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class BetaLevels:
    """Levels that follow the Beta(alpha, beta) distribution, on [0, 1]."""

    alpha: float = 1.0
    beta: float = 1.0
    minimum: float = 0.0
    maximum: float = 1.0

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution below `level`, the regularised incomplete beta function."""
        level = torch.as_tensor(level, dtype=torch.float64)
        return torch.as_tensor(scipy.special.betainc(self.alpha, self.beta, level.cpu().numpy())).to(level.device)

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the level below which the share q lies (q in [0, 1])."""
        q = torch.as_tensor(q, dtype=torch.float64)
        return torch.as_tensor(scipy.special.betaincinv(self.alpha, self.beta, q.cpu().numpy())).to(q.device)


@dataclass(frozen=True)
class ShiftedLevels:
    """Levels of another distribution on [0, 1], moved towards noise: shift level / (1 + (shift - 1) level).

    Source: Stable Diffusion 3, arXiv 2403.03206, equation 23; a scheduler's `shift`, or exp(mu) where it is dynamic.
    """

    base: LevelDistribution
    shift: float
    minimum: float = 0.0
    maximum: float = 1.0

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution below `level`."""
        level = torch.as_tensor(level, dtype=torch.float64)
        return self.base.cdf(level / (self.shift - (self.shift - 1) * level))

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the level below which the share q lies (q in [0, 1])."""
        level = self.base.inverse_cdf(q)
        return self.shift * level / (1 + (self.shift - 1) * level)


@dataclass(frozen=True)
class DiscreteLevels:
    """Levels that take a few values: a list, in which a value may come several times, with weights.

    Attributes:
        levels: values in [minimum, maximum], in any order.
        weights: one per value, none negative; None: equal.
    """

    levels: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        weights = self.weights or (1.0,) * len(self.levels)
        if len(weights) != len(self.levels) or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"{len(self.levels)} levels need as many weights, none negative and not all 0")
        if not all(self.minimum <= level <= self.maximum for level in self.levels):
            raise ValueError(f"levels must lie in [{self.minimum}, {self.maximum}]")

    def atoms(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct levels that are ever drawn, rising, and the share of the distribution up to each."""
        weights = np.ones(len(self.levels)) if self.weights is None else np.array(self.weights, dtype=float)
        levels, places = np.unique(np.array(self.levels)[weights > 0], return_inverse=True)
        share = np.bincount(places, weights[weights > 0])
        return levels, np.cumsum(share) / share.sum()

    def cdf(self, level: Tensor) -> Tensor:
        """Returns the share of the distribution up to `level`, itself included; 0 at minimum, where nothing lies below."""
        levels, share = self.atoms()
        level = torch.as_tensor(level, dtype=torch.float64)
        up_to = np.concatenate([[0.0], share])[np.searchsorted(levels, level.cpu().numpy(), side="right")]
        return torch.where(level <= self.minimum, 0.0, torch.as_tensor(up_to, dtype=torch.float64).to(level.device))

    def inverse_cdf(self, q: Tensor) -> Tensor:
        """Returns the lowest level with more than the share q of the distribution up to it (q in [0, 1])."""
        levels, share = self.atoms()
        q = torch.as_tensor(q, dtype=torch.float64)
        places = np.searchsorted(share, q.cpu().numpy(), side="right")
        return torch.as_tensor(levels[np.minimum(places, len(levels) - 1)]).to(q.device)

    def equal_edges(self, num_blocks: int) -> list[float]:
        """Returns num_blocks + 1 rising edges that share the distribution as evenly as its values allow.

        Edges lie half-way between values, so that no value lies on one; where a value outweighs a block, the edges that would
        coincide go to the next gaps.

        Raises:
            ValueError: fewer values than blocks.
        """
        levels, share = self.atoms()
        if len(levels) < num_blocks:
            raise ValueError(f"num_blocks={num_blocks} is more than the {len(levels)} different levels that are trained")
        places = [0]  # how many values lie below each edge
        for edge in range(1, num_blocks):
            nearest = int(np.argmin(np.abs(share - edge / num_blocks))) + 1
            places.append(min(max(nearest, places[-1] + 1), len(levels) - (num_blocks - edge)))
        return [self.minimum, *((levels[place - 1] + levels[place]) / 2 for place in places[1:]), self.maximum]


@functools.lru_cache(maxsize=1024)
def _shares_below(distribution: LevelDistribution, low: float, high: float) -> tuple[float, float]:
    """Returns the cdf at both ends of an interval; every step of a block asks for the same two."""
    q_low, q_high = distribution.cdf(torch.tensor([low, high], dtype=torch.float64)).tolist()
    return q_low, q_high


def sample_interval(distribution: LevelDistribution, low: float, high: float, uniform: Tensor) -> Tensor:
    """Draws levels from a distribution restricted to [low, high], by inverse transform on `uniform`'s device.

    Args:
        uniform: numbers in [0, 1), float64, any shape.

    Returns:
        Levels of that shape, float64.
    """
    q_low, q_high = _shares_below(distribution, low, high)
    return distribution.inverse_cdf(q_low + uniform * (q_high - q_low)).clamp(low, high)


# ---------------------------------------------------------------------------------------------------------------------
# Partition, overlap, routing, layers


@dataclass(frozen=True)
class Partition:
    """The cut of the levels into blocks, and the one answer to "which block owns this level".

    Attributes:
        edges: num_blocks + 1 strictly decreasing levels, from the highest to the lowest.
    """

    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        gaps = [below < above * (1 - 2 * EDGE_TOLERANCE) for above, below in zip(self.edges[:-1], self.edges[1:], strict=True)]
        if len(self.edges) < 2 or not all(gaps) or self.edges[-1] < 0:
            raise ValueError(f"edges must strictly decrease, not be negative and number two at least, got {self.edges}")

    @property
    def num_blocks(self) -> int:
        return len(self.edges) - 1

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of a block, without overlap."""
        return self.edges[block + 1], self.edges[block]

    def block_of(self, level: float) -> int:
        """Returns the block that owns a level: the router of training, evaluation and sampling.

        The highest level belongs to block 0, an inner edge to the block below it, since a sampling step that starts there
        goes down into that block.

        Raises:
            ValueError: the level lies outside the partition.
        """
        if not self.edges[-1] * (1 - EDGE_TOLERANCE) <= level <= self.edges[0] * (1 + EDGE_TOLERANCE):
            raise ValueError(f"level {level} lies outside the partition [{self.edges[-1]}, {self.edges[0]}]")
        return int(sum(level <= edge * (1 + EDGE_TOLERANCE) for edge in self.edges[1:-1]))

    def masses(self, distribution: LevelDistribution) -> list[float]:
        """Returns the share of a level distribution that falls into each block; they sum to 1."""
        q = distribution.cdf(torch.tensor(self.edges, dtype=torch.float64))
        return (q[:-1] - q[1:]).tolist()


def make_partition(
    name: str, num_blocks: int, distribution: LevelDistribution, edges: Sequence[float] | None = None
) -> Partition:
    """Cuts the levels of a distribution into blocks.

    Args:
        name: `equi_probability` (equal steps of the cdf; section 3.3), `log_uniform` (equal steps of ln level; what appendix
            E.6 calls uniform), `uniform` (equal steps of the level; the formula in section 3.3) or `custom`.
        edges: for `custom` alone: num_blocks + 1 decreasing levels that begin and end at the distribution's bounds.

    Raises:
        ValueError: an unknown name, edges that do not decrease or do not span the levels.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    steps = torch.arange(num_blocks, -1, -1, dtype=torch.float64) / num_blocks
    low, high = distribution.minimum, distribution.maximum
    if name == "equi_probability":
        discrete = isinstance(distribution, DiscreteLevels)
        inner = distribution.equal_edges(num_blocks)[::-1] if discrete else distribution.inverse_cdf(steps).tolist()
    elif name == "log_uniform":
        if low <= 0:
            raise ValueError("log_uniform needs levels above 0, these begin at 0")
        inner = (low * (high / low) ** steps).tolist()
    elif name == "uniform":
        inner = (low + (high - low) * steps).tolist()
    elif name == "custom":
        inner = [float(edge) for edge in edges or ()]
        spans = len(inner) == num_blocks + 1 and np.allclose([inner[0], inner[-1]], [high, low], rtol=EDGE_TOLERANCE, atol=0)
        if not spans:
            raise ValueError(f"custom edges need num_blocks + 1 = {num_blocks + 1} levels from {high} to {low}, got {inner}")
    else:
        raise ValueError(f"partition is one of equi_probability, log_uniform, uniform, custom, got {name!r}")
    return Partition((high, *inner[1:-1], low))


def equal_shares(edges: Sequence[float], amounts: Sequence[float], num_blocks: int) -> list[float]:
    """Returns num_blocks + 1 decreasing levels between which equal amounts lie.

    Args:
        edges: K + 1 ascending levels, of K cells.
        amounts: K, not negative: what lies in each cell, spread evenly over its logarithm, or over the cell where levels
            reach down to 0.
    """
    total = np.concatenate([[0.0], np.cumsum(amounts)])
    wanted = np.linspace(total[-1], 0.0, num_blocks + 1)
    logarithmic = edges[0] > 0
    levels = np.interp(wanted, total, np.log(edges) if logarithmic else edges)
    levels = np.exp(levels) if logarithmic else levels
    levels[[0, -1]] = edges[-1], edges[0]
    return levels.tolist()


def widen_log(low: float, high: float, overlap: float, minimum: float, maximum: float) -> tuple[float, float]:
    """Widens a block's training interval at both ends in log sigma, then clamps it.

    [low / alpha, high * alpha] with alpha = (high / low)^overlap: the log width grows by the factor 1 + 2 overlap. The paper
    does not mention the clamp to [minimum, maximum]; the released code has it.

    Source: DiffusionBlocks v4 section 3.4, v1 equation 15.
    """
    alpha = (high / low) ** overlap
    return max(low / alpha, minimum), min(high * alpha, maximum)


def widen_linear(low: float, high: float, overlap: float, minimum: float, maximum: float) -> tuple[float, float]:
    """Widens a block's interval by the share `overlap` of its width at both ends, within [minimum, maximum]."""
    margin = overlap * (high - low)
    return max(low - margin, minimum), min(high + margin, maximum)


def widen_on_scale(
    low: float, high: float, overlap: float, minimum: float, maximum: float, levels: np.ndarray, scale: np.ndarray
) -> tuple[float, float]:
    """Widens a block's interval by the share `overlap` of its width on another scale, such as log-SNR, at both ends.

    Args:
        levels, scale: (n,) both rising: the scale's value at each level. Outside them the scale does not go on: at a noise share
            of 0 or 1, log-SNR is infinite.
    """
    below, above = np.interp([low, high], levels, scale)
    margin = overlap * (above - below)
    wide_low, wide_high = np.interp([below - margin, above + margin], scale, levels)
    return max(min(wide_low, low), minimum), min(max(wide_high, high), maximum)


def split_layers(depth: int, num_blocks: int, layers: Sequence[int] | None = None) -> list[int]:
    """Returns how many layers each block owns, block 0 (the first layers) first.

    Without a list the split is even, the first blocks taking one more where it does not divide.

    Raises:
        ValueError: a block without layers, or a list that does not own every layer exactly once.
    """
    if num_blocks > depth:
        raise ValueError(f"num_blocks={num_blocks} is more than the model's {depth} layers; each block needs at least one")
    if layers is None:
        return [depth // num_blocks + (block < depth % num_blocks) for block in range(num_blocks)]
    if len(layers) != num_blocks or sum(layers) != depth or min(layers) < 1:
        raise ValueError(f"layers={list(layers)} must list {num_blocks} counts of at least 1 that sum to the depth, {depth}")
    return list(layers)


def split_costs(costs: Sequence[float], num_blocks: int) -> list[int]:
    """Returns how many consecutive layers each block owns, so that the costliest block costs as little as it can.

    Args:
        costs: of each layer, at least as many as blocks.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, blocks: int) -> tuple[float, float, tuple[int, ...]]:
        """Returns the largest cost, the sum of squares, which decides between ties, and the counts of the first layers."""
        if blocks == 1:
            return sums[end], sums[end] ** 2, (end,)
        options = []
        for start in range(blocks - 1, end):
            largest, squares, counts = best(start, blocks - 1)
            own = sums[end] - sums[start]
            options.append((max(largest, own), squares + own**2, (*counts, end - start)))
        return min(options)

    return list(best(len(costs), num_blocks)[2])


# ---------------------------------------------------------------------------------------------------------------------
# Schedules: float64 on the host, decreasing, n nodes for n asked; the step to 0 after the last node is the sampler's


def karras_schedule(n: int, minimum: float, maximum: float, rho: float = 7.0) -> np.ndarray:
    """Returns EDM's n levels from maximum to minimum, equally spaced in level^(1/rho) (EDM equation 5)."""
    if n == 1:
        return np.array([maximum])
    high, low = maximum ** (1 / rho), minimum ** (1 / rho)
    levels = (high + np.linspace(0.0, 1.0, n) * (low - high)) ** rho
    levels[[0, -1]] = maximum, minimum
    return levels


def equi_probability_schedule(n: int, distribution: LevelDistribution) -> np.ndarray:
    """Returns n levels from maximum to minimum, equally spaced in the cdf."""
    if n == 1:
        return np.array([distribution.maximum])
    levels = distribution.inverse_cdf(torch.linspace(1.0, 0.0, n, dtype=torch.float64)).numpy()
    levels[[0, -1]] = distribution.maximum, distribution.minimum
    return levels


def per_block_schedule(n: int, partition: Partition, rho: float = 7.0) -> np.ndarray:
    """Returns n levels that start at every block's upper edge, with the same number in every block.

    Where n does not divide, the noisiest blocks have one more. Inside a block the levels are spaced as Karras's; the lowest
    block ends at the lowest level if it has two or more.
    """
    counts = split_layers(n, min(n, partition.num_blocks))
    levels: list[float] = []
    for block, count in enumerate(counts):
        low, high = partition.interval(block)
        last = block == partition.num_blocks - 1
        levels.extend(karras_schedule(count if last else count + 1, low, high, rho)[:count])
    return np.array(levels)


def make_schedule(name: str, n: int, distribution: LevelDistribution, partition: Partition, rho: float = 7.0) -> np.ndarray:
    """Returns the n decreasing levels of `karras`, `equi_probability` or `per_block`.

    Raises:
        ValueError: an unknown name, or n below 1.
    """
    if n < 1:
        raise ValueError(f"a schedule needs at least 1 step, got {n}")
    if name == "karras":
        return karras_schedule(n, distribution.minimum, distribution.maximum, rho)
    if name == "equi_probability":
        return equi_probability_schedule(n, distribution)
    if name == "per_block":
        return per_block_schedule(n, partition, rho)
    raise ValueError(f"schedule is one of karras, equi_probability, per_block, got {name!r}")


def visits(schedule: np.ndarray, partition: Partition) -> list[int]:
    """Returns how many of a schedule's levels each block owns."""
    owners = [partition.block_of(level) for level in schedule]
    return np.bincount(owners, minlength=partition.num_blocks).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# EDM's preconditioning


class Preconditioning(NamedTuple):
    """D(z; sigma) = c_skip z + c_out F(c_in z; c_noise), EDM equation 7."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def precondition(sigma: Tensor, sigma_data: float) -> Preconditioning:
    """Returns EDM's coefficients (table 1) for levels of any shape, in their dtype."""
    total = sigma**2 + sigma_data**2
    return Preconditioning(sigma_data**2 / total, sigma * sigma_data / total.sqrt(), total.rsqrt(), sigma.log() / 4)


MIN_SNR_GAMMA = 5.0  # Hang et al.'s choice


def edm_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """Returns EDM's loss weight (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 1 / c_out^2 (table 1)."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def flat_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """Returns 1 / sigma_data^2 for every level: EDM's weight at high noise, where the data's own scale is all there is."""
    return torch.full_like(sigma, 1 / sigma_data**2)


def min_snr_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """Returns min(SNR, 5) / sigma_data^2 with SNR = (sigma_data / sigma)^2; EDM's weight is (SNR + 1) / sigma_data^2.

    Source: Hang et al., arXiv 2303.09556, section 3.4, for a prediction of the clean data.
    """
    return ((sigma_data / sigma) ** 2).clamp(max=MIN_SNR_GAMMA) / sigma_data**2


# Weights of the squared error of D(z; sigma), by name
WEIGHTINGS = {"edm": edm_weight, "flat": flat_weight, "min_snr": min_snr_weight}
