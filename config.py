"""The configuration: a closed schema of dataclasses, and one function that refuses what cannot work.

A key that is not here does not exist: Hydra refuses it in an overlay and on the command line alike. `resolve` fills what
depends on other keys and calls `validate`, so that every wrong setting fails before any work, in one sentence.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import dblock_modules

REQUIRED = "???"  # OmegaConf's mark for a value that a group's file must give


class SettingError(ValueError):
    """A setting that cannot work. The message is one sentence that names it and says what to do."""


def require(condition: bool, message: str) -> None:
    """Raises SettingError(message) unless the condition holds."""
    if not condition:
        raise SettingError(message)


@dataclass
class DataConfig:
    """Which images; see data.load_images."""

    name: str = REQUIRED
    path: str | None = None  # a local folder, or the name of a Hugging Face set
    size: int = REQUIRED  # height and width in pixels
    channels: int = REQUIRED
    num_classes: int = REQUIRED  # 0: labels are not used
    image_column: str | None = None  # found by itself among the usual spellings
    label_column: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    flip: bool = False  # horizontal flips in training
    scale: float | None = None  # model units per [-1, 1]; null: measured, so that the standard deviation is sigma_data
    cache: str = "~/.cache/diffusion_blocks"  # decoded arrays


@dataclass
class ModelConfig:
    """A DiT. `size` names depth, width and heads; a number given beside it wins."""

    name: str = "dit"
    size: str = REQUIRED
    patch_size: int = REQUIRED
    depth: int | None = None
    width: int | None = None
    heads: int | None = None


@dataclass
class ObjectiveConfig:
    """EDM's denoising objective: the training distribution of noise levels and the data's scale."""

    name: str = "edm"
    P_mean: float = -1.2
    P_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5


@dataclass
class MethodConfig:
    """How the model is trained.

    diffusion_blocks; end_to_end (one block); shallow (the control: one network of a block's depth over all levels, trained
    num_blocks times longer).
    """

    name: str = REQUIRED


@dataclass
class PartitionConfig:
    """How levels and layers are cut into blocks."""

    name: str = REQUIRED
    num_blocks: int = 3
    overlap: float = 0.05
    layers: list[int] | None = None  # layers per block, noisiest block first; null: even
    edges: list[float] | None = None  # for `custom`: num_blocks + 1 decreasing levels


@dataclass
class TrainConfig:
    """One optimizer per block; steps and everything that depends on them count per block."""

    steps: int = 1500  # per block
    batch_size: int = 64
    micro_batch: int | None = None  # gradient accumulation; null: the whole batch at once
    blocks: Any = "all"  # or a list: this job builds and trains these blocks only
    block_order: str = "shuffled"  # shuffled | sequential | uniform
    block_probability: str = "uniform"  # uniform | mass
    learning_rate: float = 1e-3
    schedule: str = "constant"  # constant | cosine (to zero)
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float | None = 1.0
    label_dropout: float = 0.1
    ema_half_life: int = 500_000  # images
    ema_rampup: float | None = 0.05  # half-life is at most this share of the images seen
    precision: str = "auto"  # auto | fp32 | bf16
    compile: bool = False
    activation_checkpointing: bool = False  # keep each layer's input alone and compute the rest again in the backward pass
    offload: bool = False  # only the block in training is on the device, the others wait in pinned host memory
    switch_every: int = 1  # steps that a block makes in a row; with offload 100 or so, since every change is a transfer
    log_every: int = 50  # steps of a block
    checkpoint_every: int = 1000  # steps of all blocks together
    sample_every: int = 1500  # steps of all blocks together; 0: never


@dataclass
class SamplerConfig:
    """How images are drawn."""

    name: str = "euler"  # euler | heun
    schedule: str = "karras"  # karras | equi_probability | per_block
    steps: int = 50
    rho: float = 7.0
    guidance: Any = 1.0  # one scale, or a list with one per block
    labels: Any = "balanced"  # or one label, or a list that is repeated
    num_images: int = 360
    batch_size: int = 360
    seed: int = 0
    weights: str = "ema"  # ema | raw
    format: str = "npz"  # npz | png
    resident: str = "all"  # all | one: a block is read from its file when its levels come, and the one before is let go


@dataclass
class EvalConfig:
    """Which scores, under which protocol."""

    loss_levels: int = 64
    loss_images: int = 1000  # held-out images, the first ones of the test split
    likelihood_images: int = 0  # log-likelihood of that many held-out images (at most 64 dimensions)
    likelihood_steps: int = 64
    features: str | None = "classifier"  # classifier | inception-v3-compat | null: no sample scores
    inception_weights: str | None = None
    split: str = "test"  # reference images: train | test
    guidance: list[float] | None = None  # scales that are scored one after the other; null: the sampler's
    repeats: int = 1  # sets of samples
    seed: int = 0


@dataclass
class LogConfig:
    """Where a run reports. metrics.jsonl is always written."""

    wandb: str = "off"  # off | offline | online
    project: str = "diffusion_blocks"
    progress: bool = True


@dataclass
class MergeConfig:
    """For mode=merge: the folders of runs that trained different blocks of one model."""

    runs: list[str] = field(default_factory=list)
    force: bool = False  # join runs whose threads, device or library versions differ


@dataclass
class Config:
    """The whole configuration, one field per group of configs/."""

    data: Any = REQUIRED
    model: Any = REQUIRED
    objective: Any = REQUIRED
    method: MethodConfig = field(default_factory=MethodConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    mode: str = "run"  # run (train, sample and evaluate) | train | sample | evaluate | merge | profile | plan
    seed: int = 0
    out: str = "runs"  # runs are folders in here
    folder: str | None = None  # the run's folder; null: named by data, method and a hash of what is trained
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ...
    threads: int | None = None  # CPU threads; null: PyTorch's choice
    memory: str | None = None  # for mode=plan: what a device has, such as 8GiB


# Hydra's schema nodes: (group, name, dataclass); a file of the group names its node in its defaults list.
SCHEMAS = [("data", "images", DataConfig), ("model", "dit", ModelConfig), ("objective", "edm_levels", ObjectiveConfig)]

MODES = ("run", "train", "sample", "evaluate", "merge", "profile", "plan")
# depth, width, heads (DiT's table 1; `digits` is ours)
SIZES = {"digits": (12, 64, 2), "S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


def one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raises SettingError unless the value is one of those allowed."""
    require(value in allowed, f"{name}={value} is not one of {', '.join('null' if item is None else item for item in allowed)}")


def at_least(name: str, value: float, low: float) -> None:
    """Raises SettingError unless the value is a finite number of at least `low`."""
    require(math.isfinite(value) and value >= low, f"{name}={value} must be at least {low:g}")


# The groups that decide the trained weights.
TRAINED = ("data", "model", "objective", "method", "partition", "train", "seed")


def check_typed(config: Config, overrides: list[str]) -> None:
    """Refuses what was typed on the command line and could only be ignored.

    Args:
        overrides: as typed, `key=value`.
    """
    for override in overrides:
        key = override.partition("=")[0]
        require(key[0] not in "+~", f"{key} adds or removes a key, but the configuration is closed: write {key.lstrip('+~')}=...")
        group = key.partition(".")[0]
        require(
            not (config.mode in ("sample", "evaluate") and config.folder and group in (*TRAINED, "scale", "experiment"))
            or key == "data.cache",
            f"{key} was typed, but the model in folder={config.folder} is trained already: leave it out, the folder knows it",
        )
        require(
            not (config.method.name == "end_to_end" and group == "partition"),
            f"{key} has no meaning with method=end_to_end, which trains one block over all levels: leave it out",
        )


def with_trained_settings(config: Config) -> Config:
    """Returns a configuration that samples or scores `folder` with the settings that trained it."""
    if config.mode not in ("sample", "evaluate") or config.folder is None:
        return config
    trained = load_config(Path(config.folder) / "config.yaml")
    settings = {name: getattr(trained, name) for name in TRAINED}
    settings["data"] = dataclasses.replace(trained.data, cache=config.data.cache)
    return dataclasses.replace(config, **settings)


def resolve(config: Config) -> Config:
    """Returns the configuration with everything filled in that depends on other keys; the hash of a run is taken of this.

    Raises:
        SettingError: a setting that cannot work.
    """
    config = dataclasses.replace(config)
    one_of("mode", config.mode, MODES)
    resolve_dit(config)
    if config.train.blocks != "all":
        require(
            isinstance(config.train.blocks, list) and len(config.train.blocks) > 0,
            f"train.blocks={config.train.blocks} is neither all nor a list of blocks such as [0,2]",
        )
        config.train = dataclasses.replace(config.train, blocks=sorted(config.train.blocks))
        if config.train.blocks == list(range(trained_blocks(config))):
            config.train = dataclasses.replace(config.train, blocks="all")
    validate(config)
    return config


def resolve_dit(config: Config) -> None:
    """Fills in a DiT's size, and gives one setting one name, so that tables which share it share the run."""
    one_of("model.size", config.model.size, tuple(SIZES))
    given = (config.model.depth, config.model.width, config.model.heads)
    depth, width, heads = (
        named if value is None else value for named, value in zip(SIZES[config.model.size], given, strict=True)
    )
    config.model = dataclasses.replace(config.model, depth=depth, width=width, heads=heads)
    one_of("method.name", config.method.name, ("diffusion_blocks", "end_to_end", "shallow"))
    if config.partition.num_blocks == 1:
        config.method = MethodConfig("end_to_end")
    if config.method.name == "end_to_end":
        config.partition = PartitionConfig("equi_probability", num_blocks=1, overlap=0.0)
    if config.method.name == "shallow":
        config.partition = PartitionConfig(
            "equi_probability", config.partition.num_blocks, overlap=0.0, layers=config.partition.layers
        )
    if trained_blocks(config) == 1:
        config.train = dataclasses.replace(config.train, block_order="shuffled", block_probability="uniform")


def trained_blocks(config: Config) -> int:
    """Returns how many blocks the method trains: one for end_to_end and for shallow."""
    return config.partition.num_blocks if config.method.name == "diffusion_blocks" else 1


def owned_blocks(config: Config) -> list[int]:
    """Returns the blocks that this job builds and trains."""
    return list(range(trained_blocks(config))) if config.train.blocks == "all" else config.train.blocks


def layer_split(config: Config) -> list[int]:
    """Returns the layers of each trained block; `shallow` has one network of a block's depth, rounded down."""
    if config.method.name == "shallow":
        return [config.model.depth // config.partition.num_blocks]
    return dblock_modules.split_layers(config.model.depth, config.partition.num_blocks, config.partition.layers)


def total_steps(config: Config) -> int:
    """Returns the optimizer steps of all blocks together; the same work in layers for every method."""
    return config.train.steps * config.partition.num_blocks


def levels(config: Config) -> dblock_modules.LogNormalLevels:
    """Returns the training distribution of levels."""
    objective = config.objective
    return dblock_modules.LogNormalLevels(objective.P_mean, objective.P_std, objective.sigma_min, objective.sigma_max)


def partition(config: Config) -> dblock_modules.Partition:
    """Returns the cut of the levels among the trained blocks."""
    if config.method.name == "shallow":
        return dblock_modules.make_partition("equi_probability", 1, levels(config))
    cut = config.partition
    return dblock_modules.make_partition(cut.name, cut.num_blocks, levels(config), cut.edges)


def guidance_scales(config: Config, value: Any) -> list[float]:
    """Returns one guidance scale per trained block from one number or a list."""
    count = trained_blocks(config)
    scales = list(value) if isinstance(value, list | tuple) else [value] * count
    require(
        all(isinstance(scale, int | float) for scale in scales) and len(scales) == count,
        f"guidance={value} is neither one number nor a list with one for each of the {count} blocks",
    )
    for scale in scales:
        at_least("guidance", scale, 0)
    require(
        all(scale == 1 for scale in scales) or config.train.label_dropout > 0,
        f"guidance={value} needs a model that was trained with label dropout; this one has train.label_dropout=0",
    )
    return [float(scale) for scale in scales]


def validate(config: Config) -> None:
    """Refuses combinations that cannot work; what needs the data or the disk is checked where those are opened."""
    validate_dit(config)
    validate_training(config)
    validate_sampling(config)
    one_of("log.wandb", config.log.wandb, ("off", "offline", "online"))
    if config.threads is not None:
        at_least("threads", config.threads, 1)
    require(
        (config.memory is not None) == (config.mode == "plan"),
        f"memory={config.memory} and mode=plan belong together, as in mode=plan memory=8GiB",
    )
    if config.mode == "merge":
        require(len(config.merge.runs) >= 1, "merge.runs is empty: name the folders to join, merge.runs=[runs/a,runs/b]")
        require(config.train.blocks == "all", "mode=merge makes the whole model: leave train.blocks=all")
    else:
        require(config.merge == MergeConfig(), f"merge.runs={config.merge.runs} is for mode=merge alone")


def validate_dit(config: Config) -> None:
    """Refuses a DiT, levels or a partition that do not fit each other or the images."""
    model, objective, cut = config.model, config.objective, config.partition
    for name, value in (("depth", model.depth), ("width", model.width), ("heads", model.heads), ("patch_size", model.patch_size)):
        at_least(f"model.{name}", value, 1)
    require(model.width % model.heads == 0, f"model.width={model.width} is not a multiple of model.heads={model.heads}")
    require(model.width % 4 == 0, f"model.width={model.width} is not a multiple of 4, as 2-D sin-cos positions need")
    require(
        config.data.size % model.patch_size == 0,
        f"model.patch_size={model.patch_size} does not divide the image size, {config.data.size}",
    )
    at_least("data.num_classes", config.data.num_classes, 0)
    at_least("data.channels", config.data.channels, 1)
    for name in ("P_std", "sigma_min", "sigma_data"):
        require(getattr(objective, name) > 0, f"objective.{name}={getattr(objective, name)} must be above 0")
    require(
        objective.sigma_max > objective.sigma_min,
        f"objective.sigma_max={objective.sigma_max} must be above objective.sigma_min={objective.sigma_min}",
    )
    at_least("partition.num_blocks", cut.num_blocks, 1)
    at_least("partition.overlap", cut.overlap, 0)
    require(
        (cut.edges is not None) == (cut.name == "custom"),
        f"partition.edges belongs to partition=custom and only there, got {cut.edges} with {cut.name}",
    )
    require(
        config.method.name != "shallow" or cut.layers is None,
        f"partition.layers={cut.layers} has no meaning with method=shallow, which has one network",
    )
    try:
        layer_split(config), partition(config)
    except ValueError as error:
        raise SettingError(f"partition: {error}") from None
    require(min(layer_split(config)) >= 1, f"partition.num_blocks={cut.num_blocks} is more than the {model.depth} layers")


def validate_training(config: Config) -> None:
    """Refuses settings of the loop."""
    train = config.train
    for name in ("steps", "batch_size", "log_every", "checkpoint_every", "switch_every"):
        at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("sample_every", "warmup_steps", "weight_decay", "ema_half_life"):
        at_least(f"train.{name}", getattr(train, name), 0)
    if train.micro_batch is not None:
        at_least("train.micro_batch", train.micro_batch, 1)
    owned = owned_blocks(config)
    require(
        len(set(owned)) == len(owned) and all(isinstance(b, int) and 0 <= b < trained_blocks(config) for b in owned),
        f"train.blocks={train.blocks} must name blocks of 0..{trained_blocks(config) - 1}, each once",
    )
    require(not train.offload or len(owned) > 1, "train.offload=true has nothing to offload in a job that trains one block")
    one_of("train.block_order", train.block_order, ("shuffled", "sequential", "uniform"))
    one_of("train.block_probability", train.block_probability, ("uniform", "mass"))
    one_of("train.schedule", train.schedule, ("constant", "cosine"))
    one_of("train.precision", train.precision, ("auto", "fp32", "bf16"))
    require(train.learning_rate > 0, f"train.learning_rate={train.learning_rate} must be above 0")
    for name in ("beta1", "beta2"):
        require(0 <= getattr(train, name) < 1, f"train.{name}={getattr(train, name)} must lie in [0, 1)")
    require(train.clip_norm is None or train.clip_norm > 0, f"train.clip_norm={train.clip_norm} must be above 0, or null")
    require(train.ema_rampup is None or train.ema_rampup > 0, f"train.ema_rampup={train.ema_rampup} must be above 0, or null")
    require(0 <= train.label_dropout < 1, f"train.label_dropout={train.label_dropout} must lie in [0, 1)")
    require(
        config.data.num_classes > 0 or train.label_dropout == 0,
        "train.label_dropout needs labels: set train.label_dropout=0 for a data set with num_classes=0",
    )


def validate_sampling(config: Config) -> None:
    """Refuses settings of sampling and of scores."""
    sampler, evaluation = config.sampler, config.eval
    one_of("sampler.name", sampler.name, ("euler", "heun"))
    one_of("sampler.schedule", sampler.schedule, ("karras", "equi_probability", "per_block"))
    one_of("sampler.weights", sampler.weights, ("ema", "raw"))
    one_of("sampler.format", sampler.format, ("npz", "png"))
    one_of("sampler.resident", sampler.resident, ("all", "one"))
    for name in ("steps", "num_images", "batch_size"):
        at_least(f"sampler.{name}", getattr(sampler, name), 1)
    require(sampler.rho > 0, f"sampler.rho={sampler.rho} must be above 0")
    for value in (sampler.guidance, *(evaluation.guidance or [])):
        guidance_scales(config, value)
    if sampler.labels != "balanced":
        wanted = sampler.labels if isinstance(sampler.labels, list) else [sampler.labels]
        require(
            len(wanted) > 0 and all(isinstance(label, int) and 0 <= label < config.data.num_classes for label in wanted),
            f"sampler.labels={sampler.labels} must be balanced or labels of 0..{config.data.num_classes - 1}",
        )

    for name in ("loss_levels", "loss_images", "likelihood_steps", "repeats"):
        at_least(f"eval.{name}", getattr(evaluation, name), 1)
    at_least("eval.likelihood_images", evaluation.likelihood_images, 0)
    one_of("eval.features", evaluation.features, (None, "classifier", "inception-v3-compat"))
    one_of("eval.split", evaluation.split, ("train", "test"))


def trained_identity(config: Config) -> dict[str, Any]:
    """Returns the settings that decide the trained weights: all but device, threads, logging and what is done afterwards."""
    plain = dataclasses.asdict(config)
    kept = {key: plain[key] for key in TRAINED}
    for group, key in (("data", "cache"), ("train", "log_every"), ("train", "checkpoint_every"), ("train", "sample_every")):
        del kept[group][key]
    for key in ("activation_checkpointing", "offload", "switch_every"):  # where and when, not what: the same bits
        del kept["train"][key]
    return kept


def digest(value: Any, length: int = 10) -> str:
    """Returns a short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def run_folder(config: Config) -> Path:
    """Returns the run's folder: what it trains, and a hash of all that decides the weights.

    The table that asked for the run is not in the name, so that tables which share a setting share the run.
    """
    if config.folder is not None:
        return Path(config.folder)
    if config.mode in ("profile", "plan"):
        return Path(config.out) / f"{config.mode}_{config.data.name}_{digest([trained_identity(config), config.memory])}"
    blocks = "" if config.method.name == "end_to_end" else f"_{config.partition.num_blocks}"
    return Path(config.out) / f"{config.data.name}_{config.method.name}{blocks}_{digest(trained_identity(config))}"


# The dataclass of each group whose fields depend on what its `name` says.
CLASSES = {
    "data": lambda name: DataConfig,
    "model": {"dit": ModelConfig}.get,
    "objective": {"edm": ObjectiveConfig}.get,
}


def save_config(config: Config, path: Path) -> None:
    """Writes a resolved configuration as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def load_config(path: Path) -> Config:
    """Reads a configuration that save_config wrote.

    Raises:
        SettingError: no such file, or keys that this code does not know.
    """
    require(path.is_file(), f"{path} is missing: a run's folder holds the configuration that trained it")
    plain = OmegaConf.to_container(OmegaConf.load(path))
    try:
        for item in dataclasses.fields(Config):
            if item.name in CLASSES:
                plain[item.name] = CLASSES[item.name](plain[item.name]["name"])(**plain[item.name])
            elif dataclasses.is_dataclass(item.type):
                plain[item.name] = item.type(**plain[item.name])
        return Config(**plain)
    except (TypeError, KeyError) as error:
        raise SettingError(f"{path} does not fit this version of the code: {error}") from None
