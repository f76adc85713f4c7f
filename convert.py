"""An existing diffusers transformer turned into blocks: which layers run at which noise level.

`convert` finds a model's layers, cuts them and the levels into blocks, and makes the model run the block that owns the level of
its `timestep` argument, and nothing but that block. Layers, parameters and state-dict keys stay where they are.

A level is the share of noise on the scheduler's own clock, timestep / num_train_timesteps, between 0 and 1; for flow matching it
is sigma. Edges, distributions and overlap are in levels.
"""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from checkpoint import differences
from config import SettingError, one_of, require
from dblock_modules import (
    EDGE_TOLERANCE,
    BetaLevels,
    DiscreteLevels,
    LevelDistribution,
    LogitNormalLevels,
    ModeLevels,
    Partition,
    ShiftedLevels,
    UniformLevels,
    make_partition,
    sample_interval,
    split_costs,
    split_layers,
    widen_linear,
    widen_on_scale,
)
from model import part_name

SHARED = "shared"  # the part that holds what every block runs: embeddings, norms, heads, and the layers of always_run

# Where a transformer keeps its layers, in order of execution: the first row of which the model has every list is taken.
LISTS = (
    ("transformer_blocks", "single_transformer_blocks"),
    ("joint_transformer_blocks", "single_transformer_blocks"),
    ("double_stream_blocks", "single_stream_blocks"),
    ("transformer_blocks",),
    ("visual_transformer_blocks",),
    ("blocks",),
    ("layers",),
)

# What a model's timestep argument says of the level: itself or times num_train_timesteps, counted from data or from noise.
CLOCKS = ("timestep", "sigma", "timestep_from_noise", "sigma_from_noise")

# The clocks of diffusers' transformers, read in their pipelines. A class that is not here has to be told its clock.
MODEL_CLOCKS = {
    "AllegroTransformer3DModel": "timestep",
    "AuraFlowTransformer2DModel": "sigma",
    "BriaTransformer2DModel": "timestep",
    "ChromaTransformer2DModel": "sigma",
    "CogVideoXTransformer3DModel": "timestep",
    "CogView3PlusTransformer2DModel": "timestep",
    "CogView4Transformer2DModel": "timestep",
    "DiTTransformer2DModel": "timestep",
    "Flux2Transformer2DModel": "sigma",
    "FluxTransformer2DModel": "sigma",
    "HunyuanImageTransformer2DModel": "timestep",
    "HunyuanVideoTransformer3DModel": "timestep",
    "Kandinsky5Transformer3DModel": "timestep",
    "LTXVideoTransformer3DModel": "timestep",
    "LongCatImageTransformer2DModel": "sigma",
    "Lumina2Transformer2DModel": "sigma_from_noise",
    "MochiTransformer3DModel": "timestep_from_noise",
    "OvisImageTransformer2DModel": "sigma",
    "PRXTransformer2DModel": "sigma",
    "PixArtTransformer2DModel": "timestep",
    "QwenImageTransformer2DModel": "sigma",
    "SD3Transformer2DModel": "timestep",
    "SanaTransformer2DModel": "timestep",
    "SanaVideoTransformer3DModel": "timestep",
    "SkyReelsV2Transformer3DModel": "timestep",
    "WanTransformer3DModel": "timestep",
    "ZImageTransformer2DModel": "sigma_from_noise",
}

TIME_ARGUMENTS = ("timestep", "timesteps", "t")
# Arguments of forward that no single block can serve, and why: a second time (consistency over two times, mean flows), and what a
# ControlNet adds to the output of layers that mostly do not run.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(
        ("r_timestep", "timestep_r", "timesteps_r", "target_timestep"), "two times in one forward may belong to two blocks"
    ),
    **dict.fromkeys(
        ("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states"),
        "a ControlNet feeds fixed layers, of which a block runs a part",
    ),
}
# Arguments whose first dimension is not the batch: positions of tokens, and layers to skip.
UNBATCHED_ARGUMENTS = ("img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "visual_rope_pos", "text_rope_pos", "skip_layers")


@dataclass
class LevelsConfig:
    """The distribution that training levels are drawn from, on the scheduler's clock.

    auto (uniform; for a DDPM scheduler, whose timesteps are whole, every timestep alike), uniform, logit_normal, mode, beta, or
    two discrete ones: list (values, each a timestep) and weights (one per timestep of the scheduler).
    """

    name: str = "auto"
    mean: float = 0.0  # logit_normal
    std: float = 1.0  # logit_normal
    scale: float = 1.29  # mode
    alpha: float = 1.0  # beta
    beta: float = 1.0  # beta
    shift: float = 1.0  # moves uniform, logit_normal, mode and beta towards noise, as the scheduler's shift does
    values: list[float] | None = None  # list
    weights: list[float] | None = None  # weights


@dataclass
class ConvertConfig:
    """How a transformer's layers and levels are cut into blocks; saved with the weights."""

    layers_per_block: int | None = None  # at most; the layers are shared out evenly. null: read what was saved with the model
    layer_costs: list[float] | None = None  # of every layer: as many blocks, but cut so that the costliest costs least
    overlap: float = 0.05  # the share of its width by which a block's training interval is widened at both ends
    overlap_in: str = "timestep"  # the scale of that width: timestep | log_snr
    partition: str = "equi_probability"  # equi_probability | uniform | custom
    boundaries: list[float] | None = None  # for custom: num_blocks + 1 rising levels from 0 to 1
    levels: LevelsConfig = field(default_factory=LevelsConfig)
    block_paths: list[str] | None = None  # the lists of layers by name, in order of execution; null: found
    always_run: list[int] = field(default_factory=list)  # layers that every block runs, frozen; negative ones count from the end
    clock: str | None = None  # one of CLOCKS; null: known from the model's class
    mixed: str = "split"  # a batch whose levels belong to several blocks: split | refuse


# ---------------------------------------------------------------------------------------------------------------------
# The scheduler's clock, and the distribution of levels on it


@dataclass(frozen=True)
class Clock:
    """What a scheduler says of its timesteps.

    Attributes:
        kind: `flow` (flow matching: x = (1 - level) data + level noise) or `ddpm` (whole timesteps).
        timesteps: num_train_timesteps.
        levels, log_snr: where log-SNR is finite, rising levels and its falling values; None for blocks that were read back
            without their scheduler.
    """

    kind: str
    timesteps: int
    levels: np.ndarray | None = None
    log_snr: np.ndarray | None = None

    def level_of_sigma(self, sigma: float) -> float:
        """Returns the level of a scheduler's sigma: for DDPM sigma is noise over signal, so log-SNR is -2 ln sigma."""
        if self.kind == "flow":
            return sigma
        require(sigma > 0 and self.log_snr is not None, f"sigma={sigma} must be above 0, and convert must be given the scheduler")
        return float(np.interp(2 * np.log(sigma), -self.log_snr, self.levels))


def read_clock(scheduler: Any = None) -> Clock:
    """Returns the clock of a diffusers scheduler; without one, flow matching over 1,000 timesteps.

    Raises:
        SettingError: the scheduler is of neither kind.
    """
    if scheduler is not None and hasattr(scheduler, "alphas_cumprod"):
        alphas = scheduler.alphas_cumprod.double().cpu().numpy()
        steps, finite = len(alphas), (alphas > 0) & (alphas < 1)
        log_snr = np.log(alphas[finite] / (1 - alphas[finite]))
        flow = getattr(scheduler.config, "use_flow_sigmas", False)
        if not flow:
            return Clock("ddpm", steps, np.arange(steps)[finite] / steps, log_snr)
    else:
        flow = scheduler is None or type(scheduler).__name__.startswith("FlowMatch")
        require(flow, f"scheduler: {type(scheduler).__name__} is neither a flow-matching nor a DDPM-style scheduler")
    steps = 1000 if scheduler is None else scheduler.config.num_train_timesteps
    levels = np.arange(1, steps) / steps
    return Clock("flow", steps, levels, 2 * np.log((1 - levels) / levels))


def scheduler_levels(scheduler: Any) -> list[float]:
    """Returns the levels that a scheduler is set to visit."""
    levels = [timestep / scheduler.config.num_train_timesteps for timestep in scheduler.timesteps.tolist()]
    return [1 - level for level in levels] if getattr(scheduler.config, "invert_sigmas", False) else levels


def level_distribution(settings: LevelsConfig, clock: Clock) -> LevelDistribution:
    """Returns the distribution of training levels that the settings describe.

    Raises:
        SettingError: a value out of range, a value that the named distribution does not read, or a continuous distribution for a
            scheduler with whole timesteps.
    """
    name = {"flow": "uniform", "ddpm": "weights"}[clock.kind] if settings.name == "auto" else settings.name
    one_of("levels.name", name, ("uniform", "logit_normal", "mode", "beta", "list", "weights"))
    reads = {"logit_normal": ("mean", "std"), "mode": ("scale",), "beta": ("alpha", "beta"), "list": ("values",)}.get(name, ())
    reads += ("weights",) if name == "weights" else () if name == "list" else ("shift",)
    for item in dataclasses.fields(settings)[1:]:
        given = getattr(settings, item.name)
        require(given == item.default or item.name in reads, f"levels.{item.name}={given} is not read by levels.name={name}")
    for key in ("mean", "std", "scale", "alpha", "beta", "shift"):
        require(math.isfinite(getattr(settings, key)), f"levels.{key}={getattr(settings, key)} is not finite")
    for key in ("std", "alpha", "beta", "shift"):
        require(getattr(settings, key) > 0, f"levels.{key}={getattr(settings, key)} must be above 0")
    require(
        clock.kind == "flow" or name in ("list", "weights"),
        f"levels.name={name} is continuous, but this scheduler has whole timesteps: use levels.name=weights or list",
    )
    try:
        if name == "list":
            require(bool(settings.values), "levels.name=list needs levels.values, a list of timesteps")
            return DiscreteLevels(tuple(value / clock.timesteps for value in settings.values))
        if name == "weights":
            weights = None if settings.weights is None else tuple(settings.weights)
            return DiscreteLevels(tuple(step / clock.timesteps for step in range(clock.timesteps)), weights)
    except ValueError as error:
        raise SettingError(f"levels.{reads[0]}: {error}") from None
    require(-1 <= settings.scale <= 2 / (np.pi - 2), f"levels.scale={settings.scale} must lie in [-1, 1.75]")
    base = {
        "uniform": UniformLevels(),
        "logit_normal": LogitNormalLevels(settings.mean, settings.std),
        "mode": ModeLevels(settings.scale),
        "beta": BetaLevels(settings.alpha, settings.beta),
    }[name]
    return base if settings.shift == 1 else ShiftedLevels(base, settings.shift)


# ---------------------------------------------------------------------------------------------------------------------
# The layers of a model, and models that cannot be cut


def find_lists(transformer: nn.Module, block_paths: Sequence[str] | None = None) -> dict[str, nn.ModuleList]:
    """Returns a transformer's lists of layers by name, in order of execution.

    Args:
        block_paths: the names, by hand.

    Raises:
        SettingError: no list is found, a path that leads to no ModuleList, or a list that is converted already.
    """
    if block_paths is None:
        known = [row for row in LISTS if all(isinstance(getattr(transformer, name, None), nn.ModuleList) for name in row)]
        require(bool(known), f"block_paths: {type(transformer).__name__} keeps its layers under no known name: list the names")
        block_paths = known[0]
    require(len(block_paths) > 0, "block_paths=[] names no list of layers")
    lists = {}
    for path in block_paths:
        try:
            found = transformer.get_submodule(path)
        except AttributeError:
            raise SettingError(f"block_paths: {type(transformer).__name__} has no {path}") from None
        require(not isinstance(found, RoutedLayers), f"block_paths: {path} is converted already; undo() the blocks first")
        require(type(found) is nn.ModuleList, f"block_paths: {path} is a {type(found).__name__}, not a ModuleList")
        require(path not in lists, f"block_paths: {path} is named twice")
        lists[path] = found
    return lists


def refuse_model(transformer: nn.Module) -> None:
    """Refuses models that are not one stack of layers on one stream of samples.

    Raises:
        SettingError: says why.
    """
    name = type(transformer).__name__
    children = [child for child, _ in transformer.named_children()]
    require(hasattr(transformer, "register_to_config"), f"{name} is not a diffusers model: its blocks could not be saved with it")
    require(
        "ControlNet" not in name and "controlnet_blocks" not in children,
        f"{name} is a ControlNet: its layers feed fixed layers of another model",
    )
    require(
        not any(child.startswith(("down_block", "up_block")) for child in children), f"{name} is a U-Net: skips join its halves"
    )
    require("vace_blocks" not in children, f"{name} has a second stack that feeds fixed layers of the first")
    require(
        not transformer.config.get("num_decoder_layers"),
        f"{name} is an encoder and a decoder: late layers need the early ones' output",
    )
    scaled = transformer.config.get("timestep_scale", 1.0) != 1.0
    require(not scaled, f"{name} has timestep_scale={transformer.config.get('timestep_scale')}: a consistency model's own times")
    require("temporal_transformer_blocks" not in children, f"{name} alternates between two lists of layers")


def refuse_layers(name: str, lists: Mapping[str, nn.ModuleList]) -> None:
    """Refuses layers that need each other's outputs or are looked into from outside, and what no stand-in could replace.

    Args:
        name: of the model.

    Raises:
        SettingError: says why.
    """
    for path, layers in lists.items():
        for index, layer in enumerate(layers):
            skips = "skip" in inspect.signature(layer.forward).parameters
            require(not skips, f"{name} has skip connections between its {path}: late layers need the output of early ones")
            require(
                not layer._forward_hooks,
                f"{path}.{index} has a forward hook, as feature capture at a given layer has: it would not run in other blocks",
            )
            streams(type(layer))


def time_argument(transformer: nn.Module) -> str:
    """Returns the name of the forward argument that says the level."""
    parameters = inspect.signature(transformer.forward).parameters
    names = [name for name in TIME_ARGUMENTS if name in parameters]
    require(bool(names), f"{type(transformer).__name__}.forward has no timestep: its blocks could not be told apart")
    return names[0]


@functools.cache
def streams(layer_class: type) -> tuple[tuple[str, ...], str | tuple[str, ...]]:
    """Reads from a layer's source what it passes on, so that a layer that does not run can pass it on as it came.

    Returns:
        The names of forward's arguments, and the name of the one that it returns, or of several. A forward that returns one thing
        or another is taken by its last return, the one that its default arguments reach.

    Raises:
        SettingError: forward returns something else than its own arguments, updated.
    """
    try:
        source = textwrap.dedent(inspect.getsource(layer_class.forward))
    except (OSError, TypeError):
        raise SettingError(f"{layer_class.__name__}: the source of forward is not there, so its streams are unknown") from None
    names = tuple(inspect.signature(layer_class.forward).parameters)[1:]
    returned = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    returned.sort(key=lambda value: value.lineno if value is not None else 0)
    last = returned[-1] if returned else None
    parts = last.elts if isinstance(last, ast.Tuple) else [last]
    passed = tuple(part.id for part in parts if isinstance(part, ast.Name) and part.id in names)
    require(len(passed) == len(parts), f"{layer_class.__name__}.forward returns more than its own arguments, updated")
    return names, passed if isinstance(last, ast.Tuple) else passed[0]


class Skipped:
    """Stands for a layer that does not run: what the layer would have updated is passed on as it came."""

    def __init__(self, layer: nn.Module, names: tuple[str, ...], returned: str | tuple[str, ...]) -> None:
        self._layer, self._names, self._returned = layer, names, returned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if isinstance(self._returned, str):
            return given[self._returned]
        return tuple(given.get(name) for name in self._returned)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class RoutedLayers(nn.ModuleList):
    """A ModuleList that hands out stand-ins for the layers which do not run, while its model runs a block.

    Indices, length, parameters and state-dict keys are those of the whole list. Which layers run is settled when they are handed
    out, so a layer that is recomputed later, for activation checkpointing, is the layer that ran.
    """

    _blocks: "Blocks"
    _offset: int  # index, among all layers, of the first one here
    _streams: list[tuple[tuple[str, ...], str | tuple[str, ...]]]  # of each layer, see streams()

    def _handed_out(self) -> list[Any]:
        layers = list(self._modules.values())
        running = self._blocks.running
        if running is None:
            return layers
        runs = [self._offset + index in running for index in range(len(layers))]
        return [layer if run else Skipped(layer, *own) for layer, run, own in zip(layers, runs, self._streams, strict=True)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._handed_out())

    def __getitem__(self, index: int | slice) -> Any:
        found = self._handed_out()[index]
        return nn.ModuleList(found) if isinstance(index, slice) and self._blocks.running is None else found


def measure_layers(transformer: nn.Module, arguments: Mapping[str, Any], block_paths: Sequence[str] | None = None) -> list[float]:
    """Returns the bytes that each layer keeps for backward in one forward, for `layer_costs`; before convert.

    A storage counts once, for the layer that keeps it first; parameters do not count.

    Args:
        arguments: of forward, for a batch as in training.
        block_paths: the lists of layers by name, in order of execution; None: found.
    """
    layers = [layer for own in find_lists(transformer, block_paths).values() for layer in own]
    kept = [0.0] * len(layers)
    held = {parameter.untyped_storage().data_ptr(): parameter for parameter in transformer.parameters()}
    running: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and storage.data_ptr() not in held:
            kept[running[-1]] += storage.nbytes()
        held.setdefault(storage.data_ptr(), tensor)  # lives on, so that no address stands for two
        return tensor

    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: running.append(index)))
        hooks.append(layer.register_forward_hook(lambda *_: running.clear()))
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            transformer(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def clip_routes(routes: Sequence[tuple[int, int]], layers: Sequence[int], depth: int) -> list[tuple[int, int]]:
    """Returns token routes over ranges of layers (TREAD) as far as a block's layers reach.

    Args:
        routes: (first, last) layer of each, both within the route; indices of the whole model, negative ones count from the end.
        layers: those of the block, rising.
        depth: layers of the whole model.

    Returns:
        The same in indices of the whole model; a route that misses the block is left out.

    Raises:
        SettingError: a route outside the model.
    """
    clipped = []
    for route in routes:
        first, last = (index + depth if index < 0 else index for index in route)
        require(0 <= first <= last < depth, f"routes: {tuple(route)} is no range of the model's {depth} layers")
        inside = [index for index in layers if first <= index <= last]
        if inside:
            clipped.append((inside[0], inside[-1]))
    return clipped


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


@dataclass(eq=False)
class Blocks:
    """A converted transformer: which of its layers run at which level.

    Attributes:
        layers: indices, among all layers of all lists, that each block owns; block 0 is the noisiest.
        always: indices that every block runs.
        partition: which block owns which level.
        distribution: of the training levels.
        trained: the blocks that were trained as blocks.
        given: the block that the caller chose for what runs now; None: the timestep argument decides.
        running: the layers that run, while the model does; None: no block runs.
        scheduler: of the pipeline that the blocks are attached to.
    """

    transformer: nn.Module
    config: ConvertConfig
    clock: Clock
    lists: dict[str, nn.ModuleList]
    layers: list[list[int]]
    always: list[int]
    partition: Partition
    distribution: LevelDistribution
    trained: set[int] = field(default_factory=set)
    given: int | None = None
    running: frozenset[int] | None = None
    scheduler: Any = None

    @property
    def num_blocks(self) -> int:
        return len(self.layers)

    @property
    def depth(self) -> int:
        """The layers of the whole model."""
        return sum(len(layers) for layers in self.lists.values())

    # Routing

    def level(self, timestep: Tensor) -> Tensor:
        """Returns the level that a model's timestep argument stands for, float64 on the host, of the same shape.

        Pipelines round it, to bfloat16 often. So the nearest value that may have been meant is taken, where it lies within that
        rounding: one of the attached pipeline's own timesteps, or an edge.
        """
        values = timestep.detach().to("cpu", torch.float64)
        from_noise = self.config.clock.endswith("from_noise")
        if self.config.clock.startswith("timestep"):
            values = values / self.clock.timesteps
        level = 1 - values if from_noise else values
        rounding = torch.finfo(timestep.dtype).eps if timestep.is_floating_point() else 0.0
        meant = torch.tensor(self.partition.edges if self.scheduler is None else scheduler_levels(self.scheduler)).double()
        nearest = meant[(level[..., None] - meant).abs().argmin(-1)]
        close = (level - nearest).abs() <= rounding * (1.0 if from_noise else nearest)
        return torch.where(close, nearest, level)

    def timestep(self, level: Tensor) -> Tensor:
        """Returns a level as the model's timestep argument: float32, or whole numbers for a DDPM-style scheduler."""
        values = 1 - level if self.config.clock.endswith("from_noise") else level
        if self.config.clock.startswith("timestep"):
            values = values * self.clock.timesteps
        return values.round().long() if self.clock.kind == "ddpm" else values.float()

    @torch.compiler.disable
    def owners(self, timestep: Tensor) -> list[int]:
        """Returns the block of every value of a model's timestep argument.

        Raises:
            SettingError: a value outside the levels.
        """
        level = self.level(timestep)
        try:
            return [self.partition.block_of(value) for value in level.flatten().tolist()]
        except ValueError as error:
            raise SettingError(
                f"timestep={timestep.flatten().tolist()} is not on the clock {self.config.clock!r} of {self.clock.timesteps} "
                f"timesteps: {error}"
            ) from None

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the model's forward with the block that was given, or with those that own its timesteps."""
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        for name, reason in REFUSED_ARGUMENTS.items():
            require(bound.get(name) is None, f"{name}: {reason}")
        if self.given is not None:
            return self.run_block(self.given, forward, args, kwargs)
        name = time_argument(self.transformer)
        require(isinstance(bound.get(name), Tensor), f"{name} must be a tensor, got {type(bound.get(name)).__name__}")
        owners = self.owners(bound[name])
        blocks = sorted(set(owners))
        if len(blocks) == 1:
            return self.run_block(blocks[0], forward, (), bound)
        shape = tuple(bound[name].shape)
        require(len(shape) == 1, f"{name} of shape {shape}: the levels inside one sample belong to several blocks")
        require(self.config.mixed == "split", f"{name}: the batch mixes blocks {blocks}; mixed=split takes them in turn")
        rows = [[row for row, owner in enumerate(owners) if owner == block] for block in blocks]
        outputs = [
            self.run_block(block, forward, (), {key: take_rows(key, value, own, len(owners)) for key, value in bound.items()})
            for block, own in zip(blocks, rows, strict=True)
        ]
        return join_rows(outputs, rows)

    def run_block(self, block: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the model's forward with one block's layers."""
        self.running = frozenset(self.layers[block]) | frozenset(self.always)
        try:
            return forward(*args, **kwargs)
        finally:
            self.running = None

    # Training

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of the levels that a block is trained on, overlap included."""
        low, high = self.partition.interval(block)
        if self.config.overlap_in == "timestep":
            return widen_linear(low, high, self.config.overlap, 0.0, 1.0)
        require(self.clock.log_snr is not None, "overlap_in=log_snr: to train, pass the scheduler to convert")
        return widen_on_scale(low, high, self.config.overlap, 0.0, 1.0, self.clock.levels, -self.clock.log_snr)

    def draw_levels(self, block: int, uniform: Tensor) -> Tensor:
        """Draws training levels inside a block's interval, by inverse transform.

        Args:
            uniform: numbers in [0, 1), float64: (n,) for a level per sample, (1,) for one that the batch shares.
        """
        low, high = self.interval(block)
        # What lies on the lower edge, or as near as the router sees, belongs to the next block.
        return sample_interval(self.distribution, low * (1 + 2 * EDGE_TOLERANCE), high, uniform)

    @contextmanager
    def training(self, block: int) -> Iterator[None]:
        """Runs the model with this block whatever the timesteps: those were drawn for it, its overlap included."""
        require(0 <= block < self.num_blocks, f"block={block} is not one of 0..{self.num_blocks - 1}")
        require(self.given is None, f"block {self.given} is being trained already")
        self.given = block
        try:
            yield
        finally:
            self.given = None
        if block not in self.trained:
            self.trained.add(block)
            self.remember()

    def owner(self, name: str) -> str:
        """Returns the part that owns a parameter of the transformer, adapters included: `block_<b>` or `shared`."""
        offset = 0
        for path, layers in self.lists.items():
            if name.startswith(f"{path}."):
                index = offset + int(name.removeprefix(f"{path}.").split(".")[0])
                return next((part_name(block) for block, own in enumerate(self.layers) if index in own), SHARED)
            offset += len(layers)
        return SHARED

    def freeze(self, blocks_to_train: Sequence[int], train_shared: bool = False) -> dict[str, dict[str, nn.Parameter]]:
        """Freezes what this job does not own; nothing that was frozen before is thawed. Adapters are added before this.

        Args:
            blocks_to_train: each once.
            train_shared: whether this job owns the shared part; at most one of several jobs may. Layers of always_run stay
                frozen, as no block is their owner.

        Returns:
            The parameters that are left to train, by part and by name: what optimizers are made of.

        Raises:
            SettingError: a block that is not there, or that has nothing to train.
        """
        wanted = list(blocks_to_train)
        require(
            len(wanted) > 0
            and all(type(block) is int and wanted.count(block) == 1 for block in wanted)
            and set(wanted) <= set(range(self.num_blocks)),
            f"blocks_to_train={wanted} must name blocks of 0..{self.num_blocks - 1}, each once",
        )
        names = [part_name(block) for block in wanted] + [SHARED] * train_shared
        owned: dict[str, dict[str, nn.Parameter]] = {name: {} for name in names}
        layers = tuple(f"{path}." for path in self.lists)
        for name, parameter in self.transformer.named_parameters():
            part = self.owner(name)
            if part not in names or (part == SHARED and name.startswith(layers)):
                parameter.requires_grad_(False)
            elif parameter.requires_grad:
                owned[part][name] = parameter
        for part, parameters in owned.items():
            require(len(parameters) > 0, f"blocks_to_train={wanted}: {part} has nothing to train; do adapters reach it?")
        return owned

    # Saved with the weights

    def description(self) -> dict[str, Any]:
        """Returns what has to agree when weights that were trained in blocks are used again, as plain values."""
        return {
            "options": dataclasses.asdict(self.config),
            "block_paths": list(self.lists),
            "layers": self.layers,
            "boundaries": list(self.partition.edges[::-1]),
            "clock": {"kind": self.clock.kind, "timesteps": self.clock.timesteps},
        }

    def remember(self) -> None:
        """Writes the description into the transformer's own config, which save_pretrained saves and from_pretrained reads."""
        self.transformer.register_to_config(diffusion_blocks={**self.description(), "trained": sorted(self.trained)})

    # Use

    def attach(self, pipe: Any, force: bool = False) -> Any:
        """Makes a diffusers pipeline run in blocks: every step runs the block that owns its timestep.

        Args:
            force: also with blocks that were never trained as blocks.

        Returns:
            The pipeline, with this transformer.

        Raises:
            SettingError: a pipeline without a transformer or with another class's, a scheduler with another clock, or weights
                that were trained without blocks.
        """
        require(hasattr(pipe, "transformer"), f"{type(pipe).__name__} has no transformer to run in blocks")
        ours, theirs = type(self.transformer).__name__, type(pipe.transformer).__name__
        require(pipe.transformer is None or ours == theirs, f"the pipeline's transformer is a {theirs}, the blocks are a {ours}")
        clock = read_clock(pipe.scheduler)
        require(
            (clock.kind, clock.timesteps) == (self.clock.kind, self.clock.timesteps),
            f"the pipeline's scheduler is {clock.kind} over {clock.timesteps} timesteps, the blocks were cut for "
            f"{self.clock.kind} over {self.clock.timesteps}",
        )
        untrained = sorted(set(range(self.num_blocks)) - self.trained)
        require(force or not untrained, f"blocks {untrained} were not trained as blocks; force=True runs them all the same")
        pipe.transformer, self.scheduler = self.transformer, pipe.scheduler
        return pipe

    def undo(self, force: bool = False) -> nn.Module:
        """Gives the model back as it was before `convert`, with the weights that it has now.

        Args:
            force: also for weights that were trained in blocks, which the whole depth was never trained with.
        """
        require(
            force or not self.trained,
            f"blocks {sorted(self.trained)} were trained as blocks; the whole depth never ran with them: undo(force=True)",
        )
        require("forward" not in vars(self.transformer), "undo: remove hooks and offloading that were added after convert first")
        for layers in self.lists.values():
            layers.__class__ = nn.ModuleList
            del layers._blocks, layers._offset, layers._streams
        transformer = self.transformer
        transformer.__class__ = type(transformer).__mro__[1]
        kept = {key: value for key, value in transformer.config.items() if key != "diffusion_blocks"}
        transformer._internal_dict = type(transformer.config)(kept)
        del transformer._diffusion_blocks
        return transformer


def take_rows(name: str, value: Any, rows: list[int], batch_size: int) -> Any:
    """Returns some samples of a forward argument: of tensors and lists with one entry per sample, also inside dicts."""
    if name in UNBATCHED_ARGUMENTS:
        return value
    if isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch_size:
        return value[rows]
    if isinstance(value, list) and len(value) == batch_size:
        return [value[row] for row in rows]
    if isinstance(value, dict):
        return {key: take_rows(key, item, rows, batch_size) for key, item in value.items()}
    return value


def join_rows(outputs: Sequence[Any], rows: Sequence[list[int]]) -> Any:
    """Joins what forward returned for parts of a batch (a tensor, a list of samples, a tuple or a diffusers output of these).

    Args:
        rows: of each output, the place in the batch of every sample.

    Raises:
        SettingError: an output that does not have a row for each sample.
    """
    first = outputs[0]
    if isinstance(first, Tensor | list):
        for output, own in zip(outputs, rows, strict=True):
            require(
                len(output) == len(own),
                f"the model returns {len(output)} rows for {len(own)} samples, so a batch that mixes blocks cannot be joined",
            )
        places = [place for own in rows for place in own]
        order = sorted(range(len(places)), key=places.__getitem__)
        joined = [item for output in outputs for item in output]
        return torch.cat(list(outputs))[order] if isinstance(first, Tensor) else [joined[place] for place in order]
    if isinstance(first, Mapping):
        return type(first)(**{key: join_rows([output[key] for output in outputs], rows) for key in first})
    return tuple(join_rows(items, rows) for items in zip(*outputs, strict=True))


@functools.cache
def routed_class(original: type) -> type:
    """Returns a model's class with a forward that runs one block; its name and module stay, which diffusers saves by."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._diffusion_blocks.run(functools.partial(original.forward, self), args, kwargs)

    attributes = {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), attributes)


def convert(transformer: nn.Module, layers_per_block: int | None = None, *, scheduler: Any = None, **options: Any) -> Blocks:
    """Turns a diffusers transformer into blocks, in place; `Blocks.undo` takes it back.

    Args:
        transformer: before hooks, offloading, DDP or compilation; adapters may be there or come later.
        layers_per_block: at most; None: the blocks that were saved with the model.
        scheduler: whose timesteps the model is trained on; None: flow matching over 1,000 timesteps.
        options: fields of ConvertConfig.

    Raises:
        SettingError: an option that cannot work, a model that cannot be cut, or a second conversion.
    """
    name = type(transformer).__name__
    require(isinstance(transformer, nn.Module), f"convert takes a diffusers transformer, not a {name}")
    require("_diffusion_blocks" not in vars(transformer), f"{name} is converted already; undo() its blocks first")
    known = [item.name for item in dataclasses.fields(ConvertConfig)]
    unknown = sorted(set(options) - set(known))
    require(not unknown, f"{', '.join(unknown)} is no option of convert; there are {', '.join(known)}")
    require("forward" not in vars(transformer), f"{name} has hooks, offloading or autocast around its forward: convert it before")
    saved = dict(getattr(transformer, "config", {})).get("diffusion_blocks")
    if layers_per_block is None:
        require(saved is not None, f"layers_per_block must be given: no blocks were saved with this {name}")
        require(not options, f"{', '.join(options)} was given without layers_per_block, as blocks are read from the model")
        options = saved["options"]
    else:
        options = {"layers_per_block": layers_per_block, **options}
    config = read_options(options)
    check_options(config)
    refuse_model(transformer)
    lists = find_lists(transformer, config.block_paths)
    refuse_layers(name, lists)
    time_argument(transformer)
    config = dataclasses.replace(config, clock=config.clock or MODEL_CLOCKS.get(name))
    require(config.clock is not None, f"clock: not known for {name}; give one of {', '.join(CLOCKS)}")

    if scheduler is None and saved is not None:
        clock = Clock(**saved["clock"])
    else:
        require(
            config.overlap_in == "timestep" or scheduler is not None,
            "overlap_in=log_snr needs the scheduler: pass scheduler= to convert",
        )
        clock = read_clock(scheduler)
    depth = sum(len(layers) for layers in lists.values())
    always = always_run_layers(config.always_run, depth)
    cut = [index for index in range(depth) if index not in always]
    require(
        config.layers_per_block <= len(cut),
        f"layers_per_block={config.layers_per_block} is more than the {len(cut)} layers that {name} has to share out",
    )
    num_blocks = -(-len(cut) // config.layers_per_block)
    if config.layer_costs is None:
        counts = split_layers(len(cut), num_blocks)
    else:
        given = len(config.layer_costs)
        require(given == depth, f"layer_costs has {given} numbers, but {name} has {depth} layers")
        counts = split_costs([config.layer_costs[index] for index in cut], num_blocks)
    ends = np.cumsum([0, *counts]).tolist()
    distribution = level_distribution(config.levels, clock)
    by_hand = None if config.boundaries is None else config.boundaries[::-1]
    try:
        partition = make_partition(config.partition, len(counts), distribution, by_hand)
    except ValueError as error:
        raise SettingError(f"{'boundaries' if by_hand else 'partition'}: {error}") from None
    owned = [cut[first:last] for first, last in zip(ends[:-1], ends[1:], strict=True)]
    blocks = Blocks(transformer, config, clock, lists, owned, always, partition, distribution)
    if saved is not None:
        edges = tuple(saved["boundaries"][::-1])
        if len(edges) == len(partition.edges) and np.allclose(edges, partition.edges):
            blocks.partition = Partition(edges)  # not moved by another version's rounding
        found = differences(blocks.description(), {key: value for key, value in saved.items() if key != "trained"})
        require(not found, f"these are not the blocks that {name} was saved with: {'; '.join(found[:3])}")
        blocks.trained = set(saved["trained"])

    offset = 0
    for layers in lists.values():
        layers.__class__ = RoutedLayers
        layers._blocks, layers._offset = blocks, offset
        layers._streams = [streams(type(layer)) for layer in layers._modules.values()]
        offset += len(layers)
    transformer.__class__ = routed_class(type(transformer))
    transformer._diffusion_blocks = blocks
    blocks.remember()
    return blocks


def read_options(options: Mapping[str, Any]) -> ConvertConfig:
    """Returns options as a configuration.

    Raises:
        SettingError: a value of another type, or an unknown key of `levels`.
    """
    for key, value in options.items():
        try:
            OmegaConf.merge(OmegaConf.structured(ConvertConfig), {key: value})
        except OmegaConfBaseException as error:
            raise SettingError(f"{error.full_key or key}: {str(error).splitlines()[0]}") from None
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ConvertConfig), dict(options)))


def check_options(config: ConvertConfig) -> None:
    """Refuses options that cannot work whatever the model.

    Raises:
        SettingError: names the option.
    """
    layers, overlap, boundaries = config.layers_per_block, config.overlap, config.boundaries
    require(layers >= 1, f"layers_per_block={layers} must be at least 1")
    require(0 <= overlap <= 0.5, f"overlap={overlap} must lie in [0, 0.5]")
    costs = config.layer_costs
    require(costs is None or all(0 < cost < math.inf for cost in costs), f"layer_costs={costs} must be finite and above 0")
    one_of("overlap_in", config.overlap_in, ("timestep", "log_snr"))
    one_of("partition", config.partition, ("equi_probability", "uniform", "custom"))
    one_of("clock", config.clock, (None, *CLOCKS))
    one_of("mixed", config.mixed, ("split", "refuse"))
    require((boundaries is not None) == (config.partition == "custom"), f"boundaries={boundaries} belong to partition=custom")
    if boundaries is not None:
        rising = all(low < high for low, high in zip(boundaries[:-1], boundaries[1:], strict=True))
        require(rising, f"boundaries={boundaries} must rise from 0 to 1")


def always_run_layers(always_run: Sequence[int], depth: int) -> list[int]:
    """Returns the indices of layers that every block runs; negative ones count from the end."""
    always = sorted(index + depth if index < 0 else index for index in always_run)
    inside = all(0 <= index < depth for index in always)
    require(
        inside and len(set(always)) == len(always), f"always_run={list(always_run)} must name layers of the {depth}, each once"
    )
    return always


# ---------------------------------------------------------------------------------------------------------------------
# Warm start


def starting_weights(weights: Mapping[str, Tensor], how: str, counts: Sequence[int]) -> list[dict[str, Tensor]]:
    """Returns the weights that each block begins with, from those of one network over all levels.

    Args:
        weights: by name, the i-th layer's under `layers.<i>.`; what is in no layer is every block's.
        how: `slice`: a block's own part of the depth; `every`: layers spread evenly over the whole depth, the same for every
            block; `clone`: all layers of a network as deep as a block.
        counts: layers of each block.

    Raises:
        SettingError: an unknown way, or a depth that does not fit.
    """
    one_of("train.init_layers", how, ("slice", "every", "clone"))
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    wanted = sum(counts) if how != "clone" else counts[0]
    fits = depth == wanted and (how != "clone" or len(set(counts)) == 1)
    require(fits, f"train.init_from has {depth} layers, which train.init_layers={how} cannot give to blocks of {list(counts)}")
    starts = []
    for block, count in enumerate(counts):
        first = sum(counts[:block])
        chosen = {
            "slice": range(first, first + count),
            "every": [int((index + 0.5) * depth / count) for index in range(count)],
            "clone": range(count),
        }[how]
        start = {name: value for name, value in weights.items() if not name.startswith("layers.")}
        for index, layer in enumerate(chosen):
            own = f"layers.{layer}."
            start |= {
                f"layers.{index}.{name.removeprefix(own)}": value for name, value in weights.items() if name.startswith(own)
            }
        starts.append(start)
    return starts
