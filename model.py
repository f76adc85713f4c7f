"""Blocks made from a backbone and a partition, and the objective that says what they noise, predict and score.

EDM: Karras et al., arXiv 2206.00364. DiffusionBlocks: arXiv 2506.14202, sections 3.2 to 3.4.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import config as configuration
from config import Config
from data import Source
from dblock_modules import WEIGHTINGS, LevelDistribution, Partition, precondition, sample_interval, widen_log
from hardware import Hardware
from randomness import generator, stream_seed
from vit import DiT

Backbone = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Batch = tuple[Tensor, ...]
Autocast = AbstractContextManager | None  # the context in which a backbone runs; None: as it is


class Draw(NamedTuple):
    """What names everything that is drawn for some rows of one step of one block.

    The whole batch is drawn, then the rows are taken, so that micro-batches and processes see the same numbers.
    """

    block: int
    step: int  # the block's own count, from 0
    batch_size: int
    rows: slice


def draw_noise(x: Tensor, draw: Draw, seed: int) -> tuple[Tensor, Tensor]:
    """Returns what a step's levels and noise are made of, for its whole batch, on x's device.

    Args:
        x: (n, ...) the draw's rows.

    Returns:
        uniform: (batch_size,) float64 in [0, 1); noise: (batch_size, ...) standard normal.
    """
    key = (draw.block, draw.step)
    uniform = torch.rand(
        draw.batch_size, dtype=torch.float64, device=x.device, generator=generator(seed, "sigma", *key, device=x.device)
    )
    noise = torch.randn(
        (draw.batch_size, *x.shape[1:]), device=x.device, generator=generator(seed, "noise", *key, device=x.device)
    )
    return uniform, noise


@contextmanager
def dropout_stream(seed: int, draw: Draw) -> Iterator[None]:
    """The context in which networks with dropout run: it drops by a stream of the step, and a resumed run drops the same.

    The one draw that depends on the rows: another number of micro-batches drops other units.
    """
    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(seed, "dropout", draw.block, draw.step, draw.rows.start or 0))
        yield


class Objective(Protocol):
    """What one kind of model noises, predicts and scores; what the training loop asks.

    One that knows levels has their `distribution` and `partition` too.
    """

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per sample, (n,) float32, of the block that is drawn: that one is trained, whatever the levels.

        Args:
            modules: by part name.
            batch: the draw's rows, as the data give them.
        """
        ...


@dataclass(frozen=True)
class EDMObjective:
    """Denoising of Gaussian noise under EDM's preconditioning.

    Attributes:
        distribution: training distribution of sigma.
        partition: which block owns which levels.
        overlap: the exponent gamma by which a block's training interval is widened.
        sigma_data: standard deviation of the data in model units.
        weighting: of the loss over the levels, a name of dblock_modules.WEIGHTINGS.
        null_label: the label of no label; 0 for a model without labels.
        label_dropout: share of samples that are trained without their label.
        seed: of all draws.
    """

    distribution: LevelDistribution
    partition: Partition
    overlap: float
    sigma_data: float
    weighting: str
    null_label: int
    label_dropout: float
    seed: int

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of the levels that a block is trained on, overlap included."""
        return widen_log(*self.partition.interval(block), self.overlap, self.distribution.minimum, self.distribution.maximum)

    def add_noise(self, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Noises clean samples at levels of the block's training interval.

        Args:
            x: (n, ...) the draw's rows.

        Returns:
            z: (n, ...) noisy samples; sigma: (n,) float64.
        """
        uniform, noise = draw_noise(x, draw, self.seed)
        sigma = sample_interval(self.distribution, *self.interval(draw.block), uniform[draw.rows])
        return x + expand(sigma.float(), x) * noise[draw.rows], sigma

    def drop_labels(self, labels: Tensor, draw: Draw) -> Tensor | None:
        """Returns the condition: labels (n,), a share of them replaced by the null label, by a draw per sample."""
        if self.null_label == 0:
            return None
        stream = generator(self.seed, "label_dropout", draw.block, draw.step, device=labels.device)
        uniform = torch.rand(draw.batch_size, device=labels.device, generator=stream)
        return labels.masked_fill(uniform[draw.rows] < self.label_dropout, self.null_label)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per sample of a batch of images (n, C, H, W) and labels (n,); see Objective."""
        x, labels = batch
        z, sigma = self.add_noise(x, draw)
        return self.loss(modules[part_name(draw.block)], x, z, sigma, self.drop_labels(labels, draw), autocast)

    def denoise(
        self,
        backbone: Backbone,
        z: Tensor,
        sigma: Tensor,
        condition: Tensor | None,
        autocast: Autocast = None,
    ) -> Tensor:
        """Returns D(z; sigma) = c_skip z + c_out F(c_in z; c_noise), (N, ...) float32 (EDM equation 7).

        Args:
            z: (N, ...); sigma: (N,).
            autocast: context for the backbone alone; the coefficients stay float32.
        """
        c = precondition(expand(sigma.float(), z), self.sigma_data)
        with autocast or nullcontext():
            F_x = backbone(c.c_in * z, c.c_noise.flatten(), condition)
        return c.c_skip * z + c.c_out * F_x.float()

    def loss(
        self,
        backbone: Backbone,
        x: Tensor,
        z: Tensor,
        sigma: Tensor,
        condition: Tensor | None,
        autocast: Autocast = None,
    ) -> Tensor:
        """Returns the weighted squared error per sample, mean over its dimensions: (N,) float32."""
        denoised = self.denoise(backbone, z, sigma, condition, autocast)
        error = F.mse_loss(denoised, x, reduction="none").flatten(1).mean(1)  # (N,)
        return WEIGHTINGS[self.weighting](sigma, self.sigma_data).float() * error


def expand(values: Tensor, like: Tensor) -> Tensor:
    """(N,) -> (N, 1, ..., 1) with as many dimensions as `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Discrete targets: labels and tokens, as rows of a table of embeddings


def fixed_table(rows: int, width: int, seed: int, normalize: bool) -> Tensor:
    """Returns target embeddings that depend on the seed alone, (rows, width) float32: blocks that train apart agree on them.

    Normal entries of variance 1/width, so that a row's norm is about 1; exactly 1 where they are normalised.
    """
    table = torch.randn(rows, width, generator=generator(seed, "table")) / width**0.5
    return nn.functional.normalize(table, dim=1) if normalize else table


class LearnedTable(nn.Module):
    """Target embeddings that all blocks train together; starts as the fixed table of the seed."""

    def __init__(self, rows: int, width: int, seed: int, normalize: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(fixed_table(rows, width, seed, normalize=False))
        self.normalize = normalize

    def forward(self) -> Tensor:
        return nn.functional.normalize(self.weight, dim=1) if self.normalize else self.weight  # (rows, width)


def bridge(logits: Tensor, table: Tensor, name: str, top_k: int) -> Tensor:
    """Returns the denoised embedding that a prediction stands for: what the next step starts from.

    Args:
        logits: (..., rows).
        table: (rows, width).
        name: `soft`: the expected embedding; `hard`: that of the likeliest row; `top_k`: the expected embedding among the
            top_k likeliest. With a prediction that is certain all three are the row itself, the target of training.

    Returns:
        (..., width).
    """
    if name == "hard":
        return table[logits.argmax(-1)]
    if name == "top_k" and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1) @ table


def cross_entropy_weight(name: str, sigma: Tensor, sigma_data: float) -> Tensor:
    """Returns the weight of each sample's cross-entropy, shaped like sigma, float32.

    Args:
        name: `per_sample`: EDM's weight of the sample's own level; `batch_mean`: the batch's mean weight for every sample, as
            the released code computes by multiplying (N,) by (N, 1); `none`: 1.
        sigma: (N,) of the whole batch.
    """
    if name == "none":
        return torch.ones_like(sigma, dtype=torch.float32)
    weight = WEIGHTINGS["edm"](sigma, sigma_data).float()
    return weight if name == "per_sample" else weight.mean().expand_as(weight)


@dataclass
class RoutedDenoiser:
    """D(z; sigma) of a whole model for given labels: every level goes to the block that owns it.

    Attributes:
        modules: the blocks' networks, by part name.
        labels: (N,) int64, or None for an unconditional model.
        guidance: one scale w per block; D_null + w (D_label - D_null) on all channels, so 1 is conditional and costs one forward.
        null_label: the label of no label.
        autocast: makes the backbone's context.
    """

    objective: EDMObjective
    modules: Mapping[str, nn.Module]
    labels: Tensor | None
    guidance: Sequence[float]
    null_label: int
    autocast: Callable[[], AbstractContextManager] = nullcontext

    def __call__(self, z: Tensor, sigma: float) -> Tensor:
        """Returns D, shaped like z, in float32."""
        block = self.objective.partition.block_of(sigma)
        w = self.guidance[block]
        z = z.float()
        if self.labels is None or w == 1:
            return self._denoise(block, z, sigma, self.labels)
        null = torch.full_like(self.labels, self.null_label)
        if w == 0:
            return self._denoise(block, z, sigma, null)
        both = self._denoise(block, torch.cat([z, z]), sigma, torch.cat([self.labels, null]))
        conditional, unconditional = both.chunk(2)
        return unconditional + w * (conditional - unconditional)

    def _denoise(self, block: int, z: Tensor, sigma: float, labels: Tensor | None) -> Tensor:
        levels = torch.full((len(z),), sigma, dtype=torch.float64, device=z.device)
        return self.objective.denoise(self.modules[part_name(block)], z, levels, labels, self.autocast())


class OneResident(Mapping[str, nn.Module]):
    """Parts' modules by name, of which one is held at a time: asking for another lets go of it first."""

    def __init__(self, names: Sequence[str], load: Callable[[str], nn.Module]) -> None:
        self.names, self.load = names, load
        self.held: dict[str, nn.Module] = {}

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self.held:
            self.held.clear()
            self.held[name] = self.load(name)
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass
class Model:
    """The blocks that one job holds, and what is needed to use them.

    Attributes:
        modules: by part name, on `device` when they are asked for; a job that trains some blocks holds those alone.
        scale: model units per unit of pixels in [-1, 1].
    """

    config: Config
    objective: EDMObjective
    modules: Mapping[str, nn.Module]
    scale: float
    device: torch.device
    autocast: Callable[[], AbstractContextManager] = nullcontext

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a sample."""
        data = self.config.data
        return data.channels, data.size, data.size

    def denoiser(self, labels: Tensor | None, guidance: float | Sequence[float] = 1.0) -> RoutedDenoiser:
        """Returns D(z, sigma) for these labels, (N,) int64 on the model's device, or None for an unconditional model.

        Raises:
            SettingError: guidance that the model was not trained for, or labels that it does not know.
        """
        scales = configuration.guidance_scales(self.config, guidance)
        num_classes = self.config.data.num_classes
        if num_classes == 0:
            configuration.require(labels is None, "labels were given to a model that was trained without labels")
        else:
            known = labels is not None and bool(((labels >= 0) & (labels < num_classes)).all())
            configuration.require(known, f"labels must lie in 0..{num_classes - 1}")
        return RoutedDenoiser(self.objective, self.modules, labels, scales, num_classes, self.autocast)


def saved_bytes(loss: Callable[[], Tensor], held: Iterable[Tensor]) -> int:
    """Returns the bytes that autograd keeps for the backward pass, each storage once.

    Args:
        loss: computes what is to be differentiated.
        held: tensors that are there anyway: parameters and buffers.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # a result that its own operation keeps would never be freed with its history
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    assert value.requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)


def step_memory(
    objective: Objective,
    modules: Mapping[str, nn.Module],
    trained: Sequence[Sequence[str]],
    source: Source,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
) -> tuple[list[int], list[int]]:
    """Returns the bytes that a step of each block holds.

    Args:
        modules: all parts, by name.
        trained: the parts that a step trains, by block.
        source: gives each step its batch.

    Returns:
        state: parameters, gradients, AdamW's moments and EMA, in float32, of the parts that the step trains.
        activations: what autograd keeps for the backward pass of one batch, counted once per storage, without the parameters.
    """
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    state, activations = [], []
    for block, names in enumerate(trained):
        state.append(5 * sum(p.numel() * p.element_size() for name in names for p in modules[name].parameters()))
        draw = Draw(block, 0, batch_size, slice(0, batch_size))
        batch = source.batch(block, 0, batch_size)
        loss = functools.partial(objective.training_loss, modules, batch, draw, autocast())
        activations.append(saved_bytes(loss, parameters))
    return state, activations


def part_name(block: int) -> str:
    """Returns the name of a block's part."""
    return f"block_{block}"


def trained_parts(config: Config, block: int) -> list[str]:
    """Returns the parts that a step of a block trains, its own first."""
    return [part_name(block)]


def build_module(config: Config, name: str) -> nn.Module:
    """Returns a part's module on the CPU, initialised from the stream (seed, "init/<part>") whatever else exists."""
    model, data = config.model, config.data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, f"init/{name}"))
        return DiT(
            channels=data.channels,
            size=data.size,
            patch_size=model.patch_size,
            depth=configuration.layer_split(config)[int(name.removeprefix("block_"))],
            width=model.width,
            heads=model.heads,
            num_classes=data.num_classes,
        )


def build_objective(config: Config) -> EDMObjective:
    """Returns the objective that a configuration describes."""
    return EDMObjective(
        configuration.levels(config),
        configuration.partition(config),
        config.partition.overlap,
        config.objective.sigma_data,
        config.objective.weighting,
        config.data.num_classes,
        config.train.label_dropout,
        config.seed,
    )


def build_model(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware) -> Model:
    """Returns a model to sample and score from.

    Args:
        modules: the parts' modules by name.
        scale: model units per unit of pixels in [-1, 1].
    """
    return Model(config, build_objective(config), modules, scale, hardware.device, hardware.autocast)
