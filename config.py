"""The configuration: a closed schema of dataclasses, and one function that refuses what cannot work.

A key that is not here does not exist: Hydra refuses it in an overlay and on the command line alike. `resolve` fills what
depends on other keys and calls `validate`, so that every wrong setting fails before any work, in one sentence.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

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
    crop: int = 0  # pixels of border around a random crop in training; this and randaugment are for classifiers
    randaugment: bool = False  # two of torchvision's operations at magnitude 9
    scale: float | None = None  # model units per [-1, 1]; null: measured, so that the standard deviation is sigma_data
    cache: str = "~/.cache/diffusion_blocks"  # decoded arrays


@dataclass
class LatentsConfig:
    """Images as an autoencoder's latents, which mode=encode computes once; see latents.py."""

    name: str = REQUIRED
    path: str | None = None  # the images: a local folder, or a Hugging Face set; null: ILSVRC/imagenet-1k
    vae: str = REQUIRED  # an AutoencoderKL of diffusers: a name on Hugging Face, or a folder
    image_size: int = REQUIRED  # height and width in pixels
    size: int = REQUIRED  # height and width of a latent
    channels: int = REQUIRED  # of a latent
    num_classes: int = REQUIRED  # 0: labels are not used
    image_column: str | None = None  # found by itself among the usual spellings
    label_column: str | None = None
    train_split: str = "train"
    test_split: str | None = None  # null: validation on Hugging Face, in a local folder as `test` is spelled there
    flip: bool = False  # mirrored images in training; both are encoded
    scale: float | None = None  # model units per latent in the VAE's own scale; null: measured, see DataConfig
    batch_size: int = 64  # images that are encoded, or decoded, at once
    shard_size: int = 4096  # images in a file
    cache: str = "~/.cache/diffusion_blocks"  # the shards are in a folder `name` here


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
    """EDM's denoising objective: the training distribution of noise levels, the data's scale, the weight of the loss."""

    name: str = "edm"
    P_mean: float = -1.2
    P_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5
    weighting: str = "edm"  # edm | flat | min_snr: in training; the held-out loss is always EDM's


@dataclass
class ViTConfig:
    """A ViT that classifies. `size` names depth, width and heads; a number given beside it wins."""

    name: str = "vit"
    size: str = REQUIRED
    patch_size: int = REQUIRED
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    label_token: str | None = "beside"  # the noisy label stands beside | instead of the class token
    adaLN: str | None = "dit"  # dit | released: the linear map before its activation, and a condition of width/6
    share: str | None = "nothing"  # nothing | ends: embeddings and head common to all blocks


@dataclass
class CNNConfig:
    """NoProp's convolutional network; every block or step is a whole one."""

    name: str = "noprop_cnn"
    width: int = 64  # of the label's embedding
    hidden: int = 256  # of the linear layers


@dataclass
class LabelConfig:
    """What a classifier predicts: its target embeddings, and their noise levels for diffusion_blocks.

    What a method does not use is null.
    """

    name: str = "labels"
    table: str | None = "fixed"  # fixed (from the seed) | learned (with all blocks in one job)
    normalize: bool | None = True  # rows of norm 1
    weighting: str | None = "none"  # of the cross-entropy: none | per_sample | batch_mean (as released)
    P_mean: float | None = 0.0  # with these levels every block is left some of the label; EDM's leave the cleanest block none
    P_std: float | None = 1.0
    sigma_min: float | None = 0.1
    sigma_max: float | None = 5.0
    sigma_data: float | None = None  # null: 1/sqrt(width), a normalised embedding's standard deviation
    networks: int | None = 10  # noprop_dt: one for each step
    eta: float | None = None  # noprop_dt and noprop_ct: weight of the denoising term; null: .1 and 1


@dataclass
class TextConfig:
    """Which text, and how it is cut into tokens and rows; see text_data."""

    name: str = REQUIRED  # topics (comes with Python) | text8 | files | hub
    path: str | None = None  # a file, a folder, or the name of a Hugging Face set
    tokenizer: str = "symbols"  # symbols (a to z, space) | words | bytes | a JSON file of `tokenizers` | a model's folder or name
    context: int = REQUIRED  # tokens of a row
    packing: str = "stream"  # stream | documents (whole ones, which do not see each other)
    text_column: str = "text"  # of a Parquet, Arrow or Hugging Face set
    train_split: str | None = None  # a folder's files by pattern, or the name of a split; null: train*, train
    test_split: str | None = None  # null: test* of a folder, the last 5% of anything else
    cache: str = "~/.cache/diffusion_blocks"  # tokens


@dataclass
class TransformerConfig:
    """A transformer for text: RMSNorm, rotary positions, SwiGLU."""

    name: str = "transformer"
    depth: int = REQUIRED
    width: int = REQUIRED
    heads: int = REQUIRED
    condition_width: int = 128  # of what the level says to a layer
    tied: bool = True  # the head is the token embedding


@dataclass
class RecurrentConfig:
    """A transformer whose core repeats (Huginn, arXiv 2502.05171)."""

    name: str = "recurrent"
    prelude: int = 2  # layers
    core: int = 4
    coda: int = 2
    width: int = REQUIRED
    heads: int = REQUIRED
    condition_width: int = 128
    tied: bool = True
    recurrence: float = 32  # mean repetitions of the core where it is trained as such, and their number in use
    backpropagated: int = 8  # the last repetitions, which have gradients

    @property
    def depth(self) -> int:
        """Layers that are there."""
        return self.prelude + self.core + self.coda


@dataclass
class NextTokenConfig:
    """The plain language model: cross-entropy of the next token."""

    name: str = "next_token"


@dataclass
class TokenDiffusionConfig:
    """Each token's embedding is denoised, given the tokens before it."""

    name: str = "token_diffusion"
    layout: str = "concat"  # concat (the noisy text and the clean one side by side) | inline (one sequence)
    table: str = "fixed"  # the target embeddings: fixed by the seed | learned, and shared by all blocks
    weighting: str = "none"  # of the cross-entropy: none | per_sample (EDM's weight of each token's level) | batch_mean
    P_mean: float = 0.0  # with these levels every block is left some of the token; EDM's leave the cleanest block none
    P_std: float = 1.0
    sigma_min: float = 0.1
    sigma_max: float = 5.0
    sigma_data: float | None = None  # null: 1/sqrt(width), a normalised embedding's standard deviation


@dataclass
class MaskedConfig:
    """Masked diffusion (MD4, arXiv 2406.04329): alpha = 1 - epsilon - (1 - 2 epsilon) t tokens are kept at masked share t."""

    name: str = "masked"
    epsilon: float = 1e-4


@dataclass
class MethodConfig:
    """How the model is trained.

    diffusion_blocks; end_to_end (one block, or for a classifier a plain network); shallow (the control: one network of a
    block's depth over all levels, trained num_blocks times longer); for a classifier also greedy, local, forward_forward,
    forward_forward_plain, noprop_dt, noprop_ct, noprop_fm: see baselines.py.
    """

    name: str = REQUIRED


@dataclass
class PartitionConfig:
    """How levels and layers are cut into blocks."""

    name: str = REQUIRED
    num_blocks: int = 3
    overlap: float = 0.05
    layers: list[int] | None = None  # layers per block, noisiest block first, or their ratio; null: even
    edges: list[float] | None = None  # for `custom`: num_blocks + 1 decreasing levels
    pilot: str | None = None  # a scored run, of whose `cross_entropy` (labels) or `equal_nats` (text) blocks get equal shares


@dataclass
class TrainConfig:
    """One optimizer per block; steps and everything that depends on them count per block."""

    steps: int = 1500  # per block
    match: str = "layer_work"  # layer_work: each block makes that many steps | iterations: the blocks share them
    batch_size: int = 64
    micro_batch: int | None = None  # gradient accumulation; null: the whole batch at once
    blocks: Any = "all"  # or a list: this job builds and trains these blocks only
    init_from: str | None = None  # the folder of a run with one network over all levels: its averaged weights begin every block
    init_layers: str = "slice"  # which of its layers: slice (a block's own part) | every (spread over the depth) | clone (all)
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
    parallel: str | None = None  # several processes: blocks (each its share of them) | data (all on one, rows of its batch)
    shard: bool = False  # of processes that share a block: each holds a share of its parameters (FSDP2)
    activation_checkpointing: bool = False  # keep each layer's input alone and compute the rest again in the backward pass
    offload: bool = False  # only the block in training is on the device, the others wait in pinned host memory
    switch_every: int = 1  # steps that a block makes in a row; with offload 100 or so, since every change is a transfer
    log_every: int = 50  # steps of a block
    checkpoint_every: int = 1000  # steps of all blocks together
    sample_every: int = 1500  # steps of all blocks together; 0: never
    evaluate_every: int = 0  # steps of all blocks together between held-out losses (EMA weights); 0: never


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
class TextSamplerConfig:
    """How text is drawn."""

    steps: int = 4  # per token; for masked diffusion, of the whole row
    schedule: str = "per_block"  # per_block | karras | equi_probability; masked diffusion has the cosine grid
    rho: float = 7.0
    num_samples: int = 64
    prompt: int = 0  # tokens of held-out text that each sample begins with
    prompts: int | None = None  # different beginnings, which repeat; null: one for each sample
    length: int | None = None  # tokens that are generated after it; null: to the end of a row
    temperature: float = 1.0  # with top_k and top_p at every step; below 1: likelier text, less varied
    top_k: int = 0  # the tokens to choose from; 0: all
    top_p: float = 1.0  # the share of probability to choose from
    batch_size: int = 64
    seed: int = 0
    weights: str = "ema"  # ema | raw


@dataclass
class EvalConfig:
    """Which scores, under which protocol."""

    loss_levels: int = 64
    loss_images: int = 1000  # held-out images, the first ones of the test split
    likelihood_images: int = 0  # log-likelihood of that many held-out images (at most 64 dimensions)
    likelihood_steps: int = 64
    features: str | None = "classifier"  # classifier | inception-v3-compat | null: no sample scores
    inception_weights: str | None = None
    split: str = "test"  # reference images: train | test | both
    guidance: list[Any] | None = (
        None  # scored one after the other, each a scale or a list with one per block; null: the sampler's
    )
    repeats: int = 1  # sets of samples
    batch_size: int = 500  # of held-out images and of features
    seed: int = 0
    label_steps: list[int] | None = None  # a classifier's sampling steps, scored in turn; null: one per block, NoProp: 1000
    label_schedule: str = "per_block"  # per_block | equi_probability | karras
    initial_noise: float = 0.0  # of a classifier's prediction: times sigma_max, 1 in the paper; 0 starts from the noise's mean
    bridge: str = "soft"  # what a prediction hands to the next step: soft | hard | top_k | raw (soft, rows not normalised)
    top_k: int = 5


@dataclass
class TextEvalConfig:
    """Which scores of a language model, under which protocol."""

    rows: int | None = None  # held-out rows, the first ones; null: all
    draws: int = 8  # levels of each block at which a row is scored
    batch_size: int = 32  # rows
    words: bool = True  # known words, distinct-n, repetition and entropy of generated text
    temperatures: list[float] = field(default_factory=list)  # more temperatures at which text is drawn and scored
    features: str | None = None  # MAUVE's: a causal model of `transformers` (gpt2-large is usual), or an .npz; null: no MAUVE
    mauve_scaling: float = 5.0  # the paper's: .2
    mauve_buckets: int | None = None  # null: a tenth of the samples
    mauve_seeds: int = 5
    perplexity: list[str] = field(default_factory=list)  # causal models of `transformers` by path or name
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

    runs: list[str] = field(default_factory=list)  # none: where the same settings with train.blocks=[0], [1] ... trained
    force: bool = False  # join runs whose threads, device or library versions differ
    replace: bool = False  # a block that several runs hold comes from the last of them, which may have made other train.steps


@dataclass
class Config:
    """The whole configuration, one field per group of configs/."""

    data: Any = REQUIRED
    model: Any = REQUIRED
    objective: Any = REQUIRED
    method: MethodConfig = field(default_factory=MethodConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: Any = field(default_factory=SamplerConfig)
    eval: Any = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    mode: str = "run"  # run (train, sample and evaluate) | train | sample | evaluate | merge | encode | profile | plan
    seed: int = 0
    out: str = "runs"  # runs are folders in here
    folder: str | None = None  # the run's folder; null: named by data, method and a hash of what is trained
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ...
    threads: int | None = None  # CPU threads; null: PyTorch's choice
    memory: str | None = None  # for mode=plan: what a device has, such as 8GiB


# Hydra's schema nodes: (group, name, dataclass); a file of the group names its node in its defaults list.
SCHEMAS = [
    ("data", "images", DataConfig),
    ("data", "latents", LatentsConfig),
    ("model", "dit", ModelConfig),
    ("model", "vit", ViTConfig),
    ("model", "noprop_cnn_schema", CNNConfig),
    ("objective", "edm_levels", ObjectiveConfig),
    ("objective", "label_schema", LabelConfig),
    ("data", "text", TextConfig),
    ("model", "transformer", TransformerConfig),
    ("model", "recurrent", RecurrentConfig),
    ("objective", "plain", NextTokenConfig),
    ("objective", "token_levels", TokenDiffusionConfig),
    ("objective", "masked_share", MaskedConfig),
    ("sampler", "image_sampler", SamplerConfig),
    ("sampler", "text_sampler", TextSamplerConfig),
    ("eval", "image_scores", EvalConfig),
    ("eval", "text_scores", TextEvalConfig),
]
LANGUAGE_MODELS = ("transformer", "recurrent")  # by model.name

MODES = ("run", "train", "sample", "evaluate", "merge", "encode", "profile", "plan")
LATENTS = ("imagenet256_latents",)  # data sets that are encoded first
# depth, width, heads (`S` to `XL`: DiT's table 1; `paper`: the ViT of DiffusionBlocks; `digits` is ours)
SIZES = {
    "digits": (12, 64, 2),
    "paper": (12, 128, 4),
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}


def one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raises SettingError unless the value is one of those allowed."""
    require(value in allowed, f"{name}={value} is not one of {', '.join('null' if item is None else item for item in allowed)}")


def above_zero(name: str, value: float) -> None:
    """Raises SettingError unless the value is a finite number above 0."""
    require(math.isfinite(value) and value > 0, f"{name}={value} must be a number above 0")


def is_integer(value: Any) -> bool:
    """Returns whether a value is a whole number and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def at_least(name: str, value: float, low: float) -> None:
    """Raises SettingError unless the value is a finite number of at least `low`."""
    require(math.isfinite(value), f"{name}={value} must be a finite number")
    require(value >= low, f"{name}={value} must be at least {low:g}")


def require_dit(config: Config, setting: str, asked: bool) -> None:
    """Refuses a setting that was asked for and that other models than a DiT do not have."""
    require(not asked or config.model.name == "dit", f"{setting} is not there for model={config.model.name}: leave it out")


# What the modes of cost set themselves (checkpointing, offload, and for a plan the micro-batch) or do not measure.
NOT_MEASURED = {
    "profile": ("blocks", "offload", "parallel", "shard", "activation_checkpointing", "compile"),
    "plan": ("blocks", "offload", "parallel", "shard", "activation_checkpointing", "compile", "micro_batch"),
}

# The groups that decide the trained weights.
TRAINED = ("data", "model", "objective", "method", "partition", "train", "seed")


def check_typed(config: Config, overrides: list[str]) -> None:
    """Refuses what was typed on the command line and could only be ignored.

    Args:
        overrides: as typed, `key=value`.
    """
    kept_data = ("data.cache", "data.path")
    scored = config.eval.guidance if isinstance(config.eval, EvalConfig) else None
    for override in overrides:
        key = override.partition("=")[0]
        require(key[0] not in "+~", f"{key} adds or removes a key, but the configuration is closed: write {key.lstrip('+~')}=...")
        group = key.partition(".")[0]
        require(
            not (
                config.mode in ("sample", "evaluate")
                and config.folder
                and group in (*TRAINED, "paper", "match", "scale", "experiment")
            )
            or key in kept_data,
            f"{key} was typed, but the model in folder={config.folder} is trained already: leave it out, the folder knows it",
        )
        require(
            not (config.method.name == "end_to_end" and group == "partition")
            and not (config.method.name == "shallow" and group == "partition" and key != "partition.num_blocks"),
            f"{key} has no meaning with method={config.method.name}, which has one network for all levels: leave it out",
        )
        require(
            not (key == "sampler.guidance" and scored is not None and config.mode in ("run", "evaluate")),
            f"sampler.guidance was typed, but eval.guidance={scored} names the scales that are scored: type that",
        )
        require(
            group != "train" or key.partition(".")[2] not in NOT_MEASURED.get(config.mode, ()),
            f"{key} was typed, but mode={config.mode} says itself what varies in one block's eager steps: leave it out",
        )
        if config.model.name in LANGUAGE_MODELS:
            check_typed_for_text(config, key)
        elif config.model.name != "dit":
            check_typed_for_classifier(config, key)


def check_typed_for_classifier(config: Config, key: str) -> None:
    """Refuses a typed key that this classifier's method could only ignore."""
    group, _, name = key.partition(".")
    method = config.method.name
    diffusion = method == "diffusion_blocks"
    dials = ("label_steps", "label_schedule", "initial_noise", "bridge", "top_k") if diffusion else ()
    if method in ("noprop_ct", "noprop_fm"):
        dials = ("label_steps",)
    used = {
        "sampler": ("weights", "seed"),
        "eval": ("batch_size", "seed", "loss_levels", "loss_images", *dials),
        "objective": ("", *LABEL_METHODS.get(method, ())),
    }
    if not diffusion:
        used["partition"] = ("num_blocks", "layers") if method in ("greedy", "local") else ()
    ignored = ["train.label_dropout", "train.sample_every"]
    if not diffusion:
        ignored += ["model.label_token", "model.adaLN", "model.share"]
    require(
        key not in ignored and (group not in used or name in used[group]),
        f"{key} has no meaning for model={config.model.name} with method={method}: leave it out",
    )


def check_typed_for_text(config: Config, key: str) -> None:
    """Refuses a typed key that a language model with this objective could only ignore."""
    objective = config.objective.name
    ignored = ["train.label_dropout"]
    if objective != "token_diffusion":
        ignored += ["sampler.schedule", "sampler.rho"]
    if objective == "next_token":
        ignored += ["sampler.steps", "eval.draws", "model.condition_width"]
    elif config.model.name == "recurrent":
        ignored += ["model.recurrence", "model.backpropagated"]
    require(key not in ignored, f"{key} has no meaning for model={config.model.name} with objective={objective}: leave it out")


def with_trained_settings(config: Config, overrides: list[str]) -> Config:
    """Returns a configuration that samples or scores `folder` with its own settings, but for what was typed."""
    if config.mode not in ("sample", "evaluate") or config.folder is None:
        return config
    stored = load_config(Path(config.folder) / "config.yaml")
    typed = {override.partition("=")[0] for override in overrides}
    settings = {name: getattr(stored, name) for name in (*TRAINED, "sampler", "eval")}
    for group in ("data", "sampler", "eval"):
        names = [item.name for item in dataclasses.fields(settings[group]) if f"{group}.{item.name}" in typed]
        given = {name: getattr(getattr(config, group), name) for name in names}
        settings[group] = dataclasses.replace(settings[group], **given)
    return dataclasses.replace(config, **settings)


def resolve(config: Config) -> Config:
    """Returns the configuration, checked, in the one form that settings of the same meaning share; a run's hash is taken of it.

    Raises:
        SettingError: a setting that cannot work.
    """
    config = dataclasses.replace(config)
    one_of("mode", config.mode, MODES)
    one_of("model.name", config.model.name, ("dit", "vit", "noprop_cnn", *LANGUAGE_MODELS))
    if config.model.name == "dit":
        size_transformer(config)
    elif config.model.name in LANGUAGE_MODELS:
        fill_text(config)
    else:
        fill_classifier(config)
    validate(config)
    unify(config)
    return config


def size_transformer(config: Config) -> None:
    """Fills in the depth, width and heads that a size names, and layers that were listed as a ratio."""
    one_of("model.size", config.model.size, tuple(SIZES))
    given = (config.model.depth, config.model.width, config.model.heads)
    depth, width, heads = (
        named if value is None else value for named, value in zip(SIZES[config.model.size], given, strict=True)
    )
    config.model = dataclasses.replace(config.model, depth=depth, width=width, heads=heads)
    cut = config.partition
    if cut.layers and min(cut.layers) >= 1 and config.model.depth % sum(cut.layers) == 0:
        layers = [count * config.model.depth // sum(cut.layers) for count in cut.layers]
        even = len(set(layers)) == 1 and len(layers) == cut.num_blocks
        config.partition = dataclasses.replace(cut, layers=None if even else layers)


def fill_text(config: Config) -> None:
    """Refuses groups that do not belong to a language model, and fills in what its objective decides."""
    for name, wanted in (("data", TextConfig), ("sampler", TextSamplerConfig), ("eval", TextEvalConfig)):
        require(
            isinstance(getattr(config, name), wanted),
            f"model.name={config.model.name} is a language model and needs text: set {name}= to one of its text options",
        )
    one_of("objective.name", config.objective.name, ("next_token", "token_diffusion", "masked"))
    one_of("method.name", config.method.name, ("diffusion_blocks", "end_to_end", "shallow"))
    config.train = dataclasses.replace(config.train, label_dropout=0.0)  # there are no labels
    if config.sampler.length is None:
        config.sampler = dataclasses.replace(config.sampler, length=config.data.context - config.sampler.prompt)
    if config.objective.name == "token_diffusion" and config.objective.sigma_data is None:
        config.objective = dataclasses.replace(config.objective, sigma_data=config.model.width**-0.5)
    if config.model.name == "recurrent":
        require(
            config.objective.name != "masked",
            "objective.name: model.name=recurrent is trained by next_token or token_diffusion, not masked",
        )
        if config.objective.name == "token_diffusion":
            require(config.objective.layout == "inline", "model.name=recurrent needs objective.layout=inline")
    if config.model.name == "recurrent" or config.objective.name == "next_token":
        require(
            config.method.name == "end_to_end" or config.partition.num_blocks == 1,
            f"a {config.model.name} trained by {config.objective.name} is one block: set method=end_to_end",
        )
    config.partition = with_pilot(config, "equal_nats", nats_curve)


def unify(config: Config) -> None:
    """Gives settings of one meaning one form, so that tables which share a setting share the run."""
    if config.data.path is not None and Path(config.data.path).expanduser().exists():
        config.data = dataclasses.replace(config.data, path=str(Path(config.data.path).expanduser().resolve()))
    if isinstance(config.data, LatentsConfig) and Path(config.data.vae).expanduser().exists():
        config.data = dataclasses.replace(config.data, vae=str(Path(config.data.vae).expanduser().resolve()))
    if config.model.name in ("dit", *LANGUAGE_MODELS):
        unify_blocks(config)
    cut = config.partition
    if cut.name == "equi_probability":  # the blocks' masses are equal
        config.train = dataclasses.replace(config.train, block_probability="uniform")
    if trained_blocks(config) == 1:
        config.train = dataclasses.replace(config.train, block_order="shuffled", block_probability="uniform")
    if (config.train.micro_batch or 0) >= config.train.batch_size:
        config.train = dataclasses.replace(config.train, micro_batch=None)
    if cut.num_blocks == 1:
        config.train = dataclasses.replace(config.train, match="layer_work")
    if config.train.blocks != "all":
        owned = sorted(config.train.blocks)
        config.train = dataclasses.replace(config.train, blocks="all" if len(owned) == trained_blocks(config) else owned)
    if config.model.name in LANGUAGE_MODELS:
        return
    config.sampler = dataclasses.replace(config.sampler, guidance=as_floats(config.sampler.guidance))
    if config.eval.guidance is not None:
        config.eval = dataclasses.replace(config.eval, guidance=as_floats(config.eval.guidance))


def unify_blocks(config: Config) -> None:
    """Gives methods of one meaning one form."""
    if config.partition.num_blocks == 1:
        config.method = MethodConfig("end_to_end")
    if config.method.name == "end_to_end":
        config.partition = PartitionConfig("equi_probability", num_blocks=1, overlap=0.0)
    if config.method.name == "shallow":
        config.partition = PartitionConfig(
            "equi_probability", config.partition.num_blocks, overlap=0.0, layers=config.partition.layers
        )


def as_floats(value: Any) -> Any:
    """Returns a number, or the numbers of a list, as float."""
    return [as_floats(item) for item in value] if isinstance(value, list) else float(value)


# What a classifier's methods use of LabelConfig; they need no more of the partition than its blocks, and no levels, but for
# diffusion_blocks.
LEVELS = ("weighting", "P_mean", "P_std", "sigma_min", "sigma_max", "sigma_data")
LABEL_METHODS = {
    "diffusion_blocks": ("table", "normalize", *LEVELS),
    "end_to_end": (),
    "greedy": (),
    "local": (),
    "forward_forward": (),
    "forward_forward_plain": (),
    "noprop_dt": ("table", "normalize", "networks", "eta"),
    "noprop_ct": ("table", "normalize", "eta"),
    "noprop_fm": ("table", "normalize"),
}
IMAGE_STD = 0.5  # of a classifier's input, as of the images of the other models


def fill_classifier(config: Config) -> None:
    """Fills in what depends on other keys, and sets what the method does not use to null, so that equal runs have one name."""
    method = config.method.name
    one_of("method.name", method, tuple(LABEL_METHODS))
    require(config.objective.name == "labels", f"model={config.model.name} classifies: set objective=labels")
    if config.model.name == "vit":
        size_transformer(config)
        if method != "diffusion_blocks":
            config.model = dataclasses.replace(config.model, label_token=None, adaLN=None, share=None)
    if method != "diffusion_blocks":
        config.train = dataclasses.replace(config.train, match="layer_work")
    unused = {item.name: None for item in dataclasses.fields(LabelConfig)} | {"name": "labels"}
    unused |= {name: getattr(config.objective, name) for name in LABEL_METHODS[method]}
    config.objective = LabelConfig(**unused)
    if method == "diffusion_blocks" and config.objective.sigma_data is None:
        config.objective.sigma_data = config.model.width**-0.5
    if method in ("noprop_dt", "noprop_ct") and config.objective.eta is None:
        config.objective.eta = 0.1 if method == "noprop_dt" else 1.0
    if method == "diffusion_blocks":
        config.partition = with_pilot(config, "cross_entropy", cross_entropy_curve)
    else:
        blocks = config.partition.num_blocks if method in ("greedy", "local") else 1
        if method.startswith("forward_forward"):
            blocks = config.model.depth
        layers = config.partition.layers if method in ("greedy", "local") else None
        config.partition = PartitionConfig("equi_probability", blocks, overlap=0.0, layers=layers)
    config.train = dataclasses.replace(config.train, label_dropout=0.0, sample_every=0)  # no label is given, nothing is drawn
    if method in ("greedy", "forward_forward"):
        config.train = dataclasses.replace(config.train, block_order="sequential", block_probability="uniform")
    elif method == "noprop_dt":
        config.train = dataclasses.replace(config.train, block_probability="uniform")


def with_pilot(
    config: Config, name: str, curve: Callable[[list[dict[str, Any]]], tuple[list[float], list[float]] | None]
) -> PartitionConfig:
    """Returns the partition with edges between which a pilot has equal amounts of something, where it asks for that.

    Args:
        name: of such a partition.
        curve: ascending levels and the amount between each two, from the pilot's results; None where they have none.

    Raises:
        SettingError: no scored pilot there, or one of other levels.
    """
    cut = config.partition
    require(
        (cut.pilot is not None) == (cut.name == name),
        f"partition.pilot={cut.pilot} belongs to partition={name} and only there: a run's folder, trained and scored",
    )
    if cut.name != name:
        return cut
    path = Path(cut.pilot) / "results.json"
    require(path.is_file(), f"partition.pilot={cut.pilot}: {path} is missing: train and score a run with one block first")
    try:
        found = curve(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError(
            f"partition.pilot={cut.pilot}: {path} is not a list of results ({error}): score the run again"
        ) from None
    require(found is not None, f"partition.pilot={cut.pilot} has no curve over levels: score a run of diffusion with one block")
    edges, amounts = found
    bounds = levels(config)
    require(
        math.isclose(edges[0], bounds.minimum) and math.isclose(edges[-1], bounds.maximum),
        f"partition.pilot={cut.pilot} has levels from {edges[0]} to {edges[-1]}, this model has others: "
        f"{bounds.minimum} to {bounds.maximum}",
    )
    return dataclasses.replace(cut, name="custom", edges=dblock_modules.equal_shares(edges, amounts, cut.num_blocks), pilot=None)


def cross_entropy_curve(results: list[dict[str, Any]]) -> tuple[list[float], list[float]] | None:
    """Returns levels and the cross-entropy of labels between them, from a classifier's results."""
    curves = [row["by_level"] for row in results if row["kind"] == "label_denoising"]
    if not curves:
        return None
    return curves[-1]["edges"], [mass * loss for mass, loss in zip(curves[-1]["mass"], curves[-1]["cross_entropy"], strict=True)]


def nats_curve(results: list[dict[str, Any]]) -> tuple[list[float], list[float]] | None:
    """Returns levels and the nats of the likelihood's bound between them, from a language model's results."""
    curves = [row["nats_by_level"] for row in results if "nats_by_level" in row]
    return (curves[-1]["edges"], curves[-1]["nats"]) if curves else None


def trained_blocks(config: Config) -> int:
    """Returns how many blocks the training loop knows: what a step trains is one of them.

    One where all parts train at every step; two for forward_forward, the layers and the read-out.
    """
    method = config.method.name
    if method in ("diffusion_blocks", "greedy"):
        return config.partition.num_blocks
    if method == "noprop_dt":
        return config.objective.networks
    return 2 if method == "forward_forward" else 1


def trains_together(config: Config) -> bool:
    """Returns whether the steps of several blocks train something that is common to them, so that their order matters."""
    ends, table = getattr(config.model, "share", None) == "ends", getattr(config.objective, "table", None) == "learned"
    return ends or table or config.method.name == "noprop_dt"


def owned_blocks(config: Config) -> list[int]:
    """Returns the blocks that this job builds and trains."""
    return list(range(trained_blocks(config))) if config.train.blocks == "all" else config.train.blocks


def layer_split(config: Config) -> list[int]:
    """Returns the layers of each trained block; `shallow` has one network of a block's depth, rounded down."""
    if config.method.name == "shallow":
        return [config.model.depth // config.partition.num_blocks]
    if config.model.name == "noprop_cnn":
        return [1] * config.partition.num_blocks  # every block is a whole network
    return dblock_modules.split_layers(config.model.depth, config.partition.num_blocks, config.partition.layers)


def total_steps(config: Config) -> int:
    """Returns the optimizer steps of all blocks together; matched by layer work, every method does the same arithmetic.

    A layer's forward pass counts 1, its backward pass 2, so that end to end a step over all layers is 3.
    """
    steps, blocks = config.train.steps, config.partition.num_blocks
    if config.method.name == "local":  # a step trains all groups
        return steps
    if config.method.name == "greedy":  # group b runs the b groups before it: 3 + b, on average 3 + (blocks - 1) / 2
        return blocks * max(round(steps * 6 / (5 + blocks)), 1)
    if config.method.name == "forward_forward":  # two views (6) and, as many steps again, a forward pass for the read-out (1)
        return 2 * max(round(steps * 3 / 7), 1)
    if config.method.name == "forward_forward_plain":  # right and wrong labels (6)
        return max(round(steps / 2), 1)
    if config.method.name.startswith("noprop"):  # every network makes train.steps
        return steps * trained_blocks(config)
    return steps * (blocks if config.train.match == "layer_work" else 1)


def levels(config: Config) -> dblock_modules.LevelDistribution:
    """Returns the training distribution of levels."""
    objective = config.objective
    if objective.name in ("masked", "next_token"):  # the latter knows no levels: one block over a unit interval
        return dblock_modules.UniformLevels()
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
        all(is_integer(scale) or isinstance(scale, float) for scale in scales) and len(scales) == count,
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
    if config.model.name == "dit":
        validate_dit(config)
        validate_sampling(config)
    elif config.model.name in LANGUAGE_MODELS:
        validate_text(config)
        validate_text_scores(config)
    else:
        validate_classifier(config)
        validate_sampling(config)
    validate_training(config)
    if isinstance(config.data, LatentsConfig):
        validate_latents(config.data)
    require(
        config.mode != "encode" or isinstance(config.data, LatentsConfig),
        f"mode=encode has nothing to do for data={config.data.name}: choose data=imagenet256_latents",
    )
    one_of("log.wandb", config.log.wandb, ("off", "offline", "online"))
    if config.threads is not None:
        at_least("threads", config.threads, 1)
        require(config.threads <= os.cpu_count(), f"threads={config.threads} is more than this machine's {os.cpu_count()}")
    require(config.folder != "", "folder= is empty: name a folder, or leave it null")
    require(
        (config.memory is not None) == (config.mode == "plan"),
        f"memory={config.memory} and mode=plan belong together, as in mode=plan memory=8GiB",
    )
    if config.mode in ("profile", "plan"):
        validate_cost(config)
    if config.mode == "merge":
        require(config.train.blocks == "all", "mode=merge makes the whole model: leave train.blocks=all")
    else:
        require(config.merge == MergeConfig(), "merge.runs and merge.force are for mode=merge alone: leave them out")


def validate_cost(config: Config) -> None:
    """Refuses models of which a block's cost does not follow from its layers, and methods that are not compared."""
    mode, method = config.mode, config.method.name
    require(
        config.model.name in ("dit", "vit", "transformer"),
        f"mode={mode} counts layers that are alike and run once, which model={config.model.name} has not: use another model",
    )
    require(
        method == "diffusion_blocks" or method == "end_to_end" and config.model.name != "vit",
        f"mode={mode} compares end to end with blocks, which method={method} is neither of: leave it out",
    )


def validate_dit(config: Config) -> None:
    """Refuses a DiT, levels or a partition that do not fit each other or the images."""
    one_of("method.name", config.method.name, ("diffusion_blocks", "end_to_end", "shallow"))
    one_of("objective.name", config.objective.name, ("edm",))
    one_of("partition.name", config.partition.name, ("equi_probability", "log_uniform", "uniform", "custom"))
    at_least("data.num_classes", config.data.num_classes, 0)
    require(
        isinstance(config.data, LatentsConfig) or not (config.data.crop or config.data.randaugment),
        "data.crop and data.randaugment are for classifiers: a model that draws images would learn to draw such ones",
    )
    require(config.partition.pilot is None, f"partition.pilot={config.partition.pilot} is for classifiers and text: leave it out")
    one_of("objective.weighting", config.objective.weighting, tuple(dblock_modules.WEIGHTINGS))
    validate_transformer(config)
    validate_levels(config)


def validate_classifier(config: Config) -> None:
    """Refuses a classifier whose model, method, labels and levels do not fit each other or the images."""
    model, objective, method, train = config.model, config.objective, config.method.name, config.train
    require(config.mode != "sample", "mode=sample draws images, and a classifier predicts labels: use mode=evaluate")
    require(
        train.init_from is None,
        f"train.init_from={train.init_from} begins blocks that draw images, not classifiers: leave it out",
    )
    require(isinstance(config.data, DataConfig), f"model={model.name} classifies images: data={config.data.name} is not for it")
    require(config.data.num_classes >= 2, f"data.num_classes={config.data.num_classes}: a classifier needs two classes at least")
    at_least("data.crop", config.data.crop, 0)
    require(config.data.crop < config.data.size, f"data.crop={config.data.crop} must be less than the images' size")
    if model.name == "vit":
        require(not method.startswith("noprop"), f"method={method} is defined on NoProp's network: set model=noprop_cnn")
        validate_transformer(config)
        layers_wanted = 2 if method.startswith("forward_forward") else 1  # the first of them is left out in one of the two
        at_least("model.depth", model.depth, layers_wanted)
        above_zero("model.mlp_ratio", model.mlp_ratio)
        require(
            model.mlp_ratio * model.width >= 1,
            f"model.mlp_ratio={model.mlp_ratio} leaves an MLP nothing of model.width={model.width}",
        )
        require(0 <= model.dropout < 1, f"model.dropout={model.dropout} must lie in [0, 1)")
        if method == "diffusion_blocks":
            one_of("model.label_token", model.label_token, ("beside", "instead"))
            one_of("model.adaLN", model.adaLN, ("dit", "released"))
            require(
                model.adaLN == "dit" or model.width >= 6,
                f"model.width={model.width}: model.adaLN=released has a condition of a sixth of it, so 6 at least",
            )
            one_of("model.share", model.share, ("nothing", "ends"))
    else:
        fits = method == "diffusion_blocks" or method.startswith("noprop")
        require(fits, f"method={method} needs a ViT's layers; model=noprop_cnn takes diffusion_blocks and the NoProp methods")
        require(
            config.data.size >= 8, f"data.size={config.data.size}: NoProp's network halves an image three times, so 8 at least"
        )
        at_least("model.width", model.width, 1)
        at_least("model.hidden", model.hidden, 1)
        require(config.partition.layers is None, "partition.layers: every block of model=noprop_cnn is a whole network")
    if objective.table is not None:
        one_of("objective.table", objective.table, ("fixed", "learned"))
    if method == "noprop_dt":
        at_least("objective.networks", objective.networks, 1)
    if objective.eta is not None:
        at_least("objective.eta", objective.eta, 0)
    if method == "diffusion_blocks":
        one_of("objective.weighting", objective.weighting, ("none", "per_sample", "batch_mean"))
        validate_levels(config)
    together = {
        "greedy": method == "greedy",
        "forward_forward": method == "forward_forward",
        "objective.table=learned": objective.table == "learned",
        "model.share=ends": model.name == "vit" and model.share == "ends",
        "NoProp's read-out": method.startswith("noprop"),
    }
    for what, needs_all in together.items():
        require(not needs_all or train.blocks == "all", f"train.blocks={train.blocks}: {what} needs all blocks in one job")
    apart = method == "end_to_end" or method == "diffusion_blocks" and not trains_together(config)
    require(
        train.parallel is None or apart,
        f"train.parallel={train.parallel}: parts work together in a step of method={method} with these settings: leave it out",
    )
    coupled = method == "forward_forward" or method == "noprop_dt"  # a contrast, or batch norm
    require(
        not coupled or train.micro_batch is None or train.micro_batch >= train.batch_size,
        f"train.micro_batch={train.micro_batch}: the samples of a batch meet in the loss of {method}, so take it whole",
    )
    require(
        not coupled or train.batch_size >= 2,
        f"train.batch_size={train.batch_size}: the samples of a batch meet in the loss of {method}, so take 2 at least",
    )
    require(
        not (train.compile and model.name == "vit" and model.share == "ends"),
        "train.compile with model.share=ends is not supported: set one of them back",
    )


def validate_transformer(config: Config) -> None:
    """Refuses a transformer that does not fit the images, and layers that do not fit the blocks."""
    model = config.model
    for name, value in (("depth", model.depth), ("width", model.width), ("heads", model.heads), ("patch_size", model.patch_size)):
        at_least(f"model.{name}", value, 1)
    require(model.width % model.heads == 0, f"model.width={model.width} is not a multiple of model.heads={model.heads}")
    require(model.width % 4 == 0, f"model.width={model.width} is not a multiple of 4, as 2-D sin-cos positions need")
    require(
        config.data.size % model.patch_size == 0,
        f"model.patch_size={model.patch_size} does not divide the image size, {config.data.size}",
    )
    at_least("data.channels", config.data.channels, 1)
    validate_layers(config)


def validate_levels(config: Config) -> None:
    """Refuses levels and a cut of them that do not fit each other."""
    objective = config.objective
    require(math.isfinite(objective.P_mean), f"objective.P_mean={objective.P_mean} must be finite")
    for name in ("P_std", "sigma_min", "sigma_max", "sigma_data"):
        above_zero(f"objective.{name}", getattr(objective, name))
    require(
        objective.sigma_max > objective.sigma_min,
        f"objective.sigma_max={objective.sigma_max} must be above objective.sigma_min={objective.sigma_min}",
    )
    require(
        levels(config).share > 1e-6,
        f"objective.P_mean={objective.P_mean} and P_std={objective.P_std} leave hardly any level between sigma_min and sigma_max",
    )
    validate_cut(config)


def validate_cut(config: Config) -> None:
    """Refuses a cut that does not fit the levels."""
    cut = config.partition
    at_least("partition.overlap", cut.overlap, 0)
    require(
        cut.overlap <= 1, f"partition.overlap={cut.overlap} must be at most 1, where a block is three times as wide in log sigma"
    )
    require(
        (cut.edges is not None) == (cut.name == "custom"),
        f"partition.edges belongs to partition=custom and only there, got {cut.edges} with {cut.name}",
    )
    try:
        partition(config)
    except ValueError as error:
        raise SettingError(f"partition: {error}") from None


def validate_latents(data: LatentsConfig) -> None:
    """Refuses settings of latents that cannot work; what needs the VAE is checked where it is opened."""
    one_of("data.name", data.name, LATENTS)
    for name in ("image_size", "batch_size", "shard_size"):
        at_least(f"data.{name}", getattr(data, name), 1)
    require(
        data.shard_size % data.batch_size == 0,
        f"data.shard_size={data.shard_size} is not a multiple of data.batch_size={data.batch_size}, and whole batches are stored",
    )
    require(data.scale is None or data.scale > 0, f"data.scale={data.scale} must be above 0, or null")


def validate_layers(config: Config) -> None:
    """Refuses layers that do not fit the blocks; end to end is not cut, whatever the configuration says of a partition."""
    cut = config.partition
    if config.method.name == "end_to_end":
        return
    at_least("partition.num_blocks", cut.num_blocks, 1)
    require(
        config.method.name != "shallow" or cut.layers is None,
        f"partition.layers={cut.layers} has no meaning with method=shallow, which has one network",
    )
    try:
        layers = layer_split(config)
    except ValueError as error:
        raise SettingError(f"partition: {error}") from None
    require(min(layers) >= 1, f"partition.num_blocks={cut.num_blocks} is more than the {config.model.depth} layers")


def validate_training(config: Config) -> None:
    """Refuses settings of the loop."""
    train = config.train
    for name in ("steps", "batch_size", "log_every", "checkpoint_every", "switch_every"):
        at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("sample_every", "evaluate_every", "warmup_steps", "weight_decay", "ema_half_life"):
        at_least(f"train.{name}", getattr(train, name), 0)
    require(train.warmup_steps <= train.steps, f"train.warmup_steps={train.warmup_steps} is more than train.steps={train.steps}")
    if train.micro_batch is not None:
        at_least("train.micro_batch", train.micro_batch, 1)
    if train.blocks != "all":
        listed = isinstance(train.blocks, list) and len(train.blocks) > 0
        require(
            listed
            and all(is_integer(block) and 0 <= block < trained_blocks(config) for block in train.blocks)
            and len(set(train.blocks)) == len(train.blocks),
            f"train.blocks={train.blocks} is neither all nor a list of blocks of 0..{trained_blocks(config) - 1}, each once",
        )
    require(
        not train.offload or len(owned_blocks(config)) > 1,
        "train.offload=true has nothing to offload in a job that trains one block",
    )
    require(
        not train.offload or (train.parallel is None and not train.shard),
        "train.offload=true is the way of one process: leave it out, or train.parallel and train.shard",
    )
    require(
        not train.offload or config.method.name not in ("greedy", "forward_forward"),
        f"train.offload=true leaves one block on the device, steps of method={config.method.name} run others too: leave it out",
    )
    require(
        not train.offload or config.model.name not in LANGUAGE_MODELS or train.sample_every == 0,
        "train.offload=true holds one block, and every token that is drawn needs all of them: set train.sample_every=0",
    )
    one_of("train.block_order", train.block_order, ("shuffled", "sequential", "uniform"))
    one_of("train.match", train.match, ("layer_work", "iterations"))
    require(
        total_steps(config) >= trained_blocks(config),
        f"train.steps={train.steps} with train.match=iterations is less than one step for each block: give more steps",
    )
    one_of("train.block_probability", train.block_probability, ("uniform", "mass"))
    one_of("train.parallel", train.parallel, (None, "blocks", "data"))
    one_of("train.schedule", train.schedule, ("constant", "cosine"))
    one_of("train.init_layers", train.init_layers, ("slice", "every", "clone"))
    require(
        train.init_from is not None or train.init_layers == "slice",
        f"train.init_layers={train.init_layers} has no meaning without train.init_from",
    )
    one_of("train.precision", train.precision, ("auto", "fp32", "bf16"))
    above_zero("train.learning_rate", train.learning_rate)
    for name in ("beta1", "beta2"):
        require(0 <= getattr(train, name) < 1, f"train.{name}={getattr(train, name)} must lie in [0, 1)")
    for name in ("clip_norm", "ema_rampup"):
        if getattr(train, name) is not None:
            above_zero(f"train.{name}", getattr(train, name))
    require(0 <= train.label_dropout < 1, f"train.label_dropout={train.label_dropout} must lie in [0, 1)")
    require(
        train.label_dropout == 0 or config.data.num_classes > 0,
        "train.label_dropout needs labels: set train.label_dropout=0 for a data set with num_classes=0",
    )


def validate_text(config: Config) -> None:
    """Refuses a language model that cannot be built or trained."""
    model, objective = config.model, config.objective
    require(not config.train.compile, "train.compile=true is not supported for language models: set it to false")
    layers = ("depth",) if model.name == "transformer" else ("prelude", "core", "coda", "recurrence", "backpropagated")
    for name in (*layers, "width", "heads", "condition_width"):
        at_least(f"model.{name}", getattr(model, name), 1)
    require(
        model.width % (2 * model.heads) == 0,
        f"model.width={model.width} must be a multiple of 2 * model.heads, {2 * model.heads}, as rotary positions need",
    )
    if objective.name == "token_diffusion":
        one_of("objective.layout", objective.layout, ("concat", "inline"))
        one_of("objective.table", objective.table, ("fixed", "learned"))
        one_of("objective.weighting", objective.weighting, ("per_sample", "batch_mean", "none"))
        require(
            objective.table == "fixed" or config.train.blocks == "all",
            f"train.blocks={config.train.blocks}: objective.table=learned needs all blocks in one job",
        )
    validate_layers(config)
    if objective.name == "token_diffusion":
        validate_levels(config)
    if objective.name == "masked":
        require(
            config.partition.name != "log_uniform", "partition=log_uniform is not there for masked shares, which reach down to 0"
        )
        require(0 < objective.epsilon < 0.5, f"objective.epsilon={objective.epsilon} must lie between 0 and .5")
        validate_cut(config)


def validate_text_scores(config: Config) -> None:
    """Refuses settings of text generation and of its scores."""
    sampler, evaluation = config.sampler, config.eval
    one_of("sampler.schedule", sampler.schedule, ("karras", "equi_probability", "per_block"))
    one_of("sampler.weights", sampler.weights, ("ema", "raw"))
    for name in ("prompt", "top_k"):
        at_least(f"sampler.{name}", getattr(sampler, name), 0)
    require(
        sampler.prompt < config.data.context,
        f"sampler.prompt={sampler.prompt} leaves nothing to generate of data.context={config.data.context}: take less",
    )
    for name in ("steps", "num_samples", "length", "batch_size"):
        at_least(f"sampler.{name}", getattr(sampler, name), 1)
    above_zero("sampler.rho", sampler.rho)
    if sampler.prompts is not None:
        at_least("sampler.prompts", sampler.prompts, 1)
        require(sampler.prompt > 0, f"sampler.prompts={sampler.prompts} has no meaning with sampler.prompt=0: leave it out")
    for name, values in (("sampler.temperature", [sampler.temperature]), ("eval.temperatures", evaluation.temperatures)):
        require(all(value > 0 for value in values), f"{name}={values} must be above 0")
    require(0 < sampler.top_p <= 1, f"sampler.top_p={sampler.top_p} must lie in (0, 1]")
    require(
        sampler.prompt + sampler.length <= config.data.context,
        f"sampler.prompt + sampler.length = {sampler.prompt + sampler.length} is more than data.context={config.data.context}",
    )
    for name in ("draws", "batch_size", "mauve_seeds"):
        at_least(f"eval.{name}", getattr(evaluation, name), 1)
    for name in ("rows", "mauve_buckets"):
        if getattr(evaluation, name) is not None:
            at_least(f"eval.{name}", getattr(evaluation, name), 1)
    require(evaluation.mauve_scaling > 0, f"eval.mauve_scaling={evaluation.mauve_scaling} must be above 0")


def validate_sampling(config: Config) -> None:
    """Refuses settings of sampling and of scores."""
    sampler, evaluation = config.sampler, config.eval
    one_of("sampler.name", sampler.name, ("euler", "heun"))
    one_of("sampler.schedule", sampler.schedule, ("karras", "equi_probability", "per_block"))
    one_of("sampler.weights", sampler.weights, ("ema", "raw"))
    one_of("sampler.format", sampler.format, ("npz", "png"))
    one_of("sampler.resident", sampler.resident, ("all", "one"))
    require_dit(config, "sampler.resident=one", sampler.resident == "one")
    for name in ("steps", "num_images", "batch_size"):
        at_least(f"sampler.{name}", getattr(sampler, name), 1)
    above_zero("sampler.rho", sampler.rho)
    require(evaluation.guidance != [], "eval.guidance=[] names no scale: leave it null to take the sampler's")
    for value in (sampler.guidance, *(evaluation.guidance or [])):
        guidance_scales(config, value)
    if sampler.labels != "balanced":
        wanted = sampler.labels if isinstance(sampler.labels, list) else [sampler.labels]
        require(
            len(wanted) > 0 and all(is_integer(label) and 0 <= label < config.data.num_classes for label in wanted),
            f"sampler.labels={sampler.labels} must be balanced or labels of 0..{config.data.num_classes - 1}",
        )

    for steps in evaluation.label_steps or []:
        at_least("eval.label_steps", steps, 1)
    one_of("eval.label_schedule", evaluation.label_schedule, ("per_block", "equi_probability", "karras"))
    one_of("eval.bridge", evaluation.bridge, ("soft", "hard", "top_k", "raw"))
    at_least("eval.top_k", evaluation.top_k, 1)
    at_least("eval.initial_noise", evaluation.initial_noise, 0)
    for name in ("loss_levels", "loss_images", "repeats", "batch_size"):
        at_least(f"eval.{name}", getattr(evaluation, name), 1)
    at_least("eval.likelihood_steps", evaluation.likelihood_steps, 2)
    at_least("eval.likelihood_images", evaluation.likelihood_images, 0)
    one_of("eval.features", evaluation.features, (None, "classifier", "inception-v3-compat"))
    one_of("eval.split", evaluation.split, ("train", "test", "both"))
    require(
        evaluation.inception_weights is None or evaluation.features == "inception-v3-compat",
        f"eval.inception_weights has no meaning with eval.features={evaluation.features}: leave it out",
    )


def trained_identity(config: Config) -> dict[str, Any]:
    """Returns the settings that decide the trained weights: all but device, threads, logging and what is done afterwards."""
    plain = dataclasses.asdict(config)
    kept = {key: plain[key] for key in TRAINED}
    del kept["data"]["cache"]
    if isinstance(config.data, LatentsConfig):  # where images and shards lie; the fingerprint says what came of them
        for key in ("path", "image_column", "label_column", "train_split", "test_split", "batch_size", "shard_size"):
            del kept["data"][key]
    # Intervals; what changes rounding only, of which the number of processes in run.json speaks; and where and when, not what.
    unnamed = ("log_every", "checkpoint_every", "sample_every", "evaluate_every", "parallel", "shard")
    for key in (*unnamed, "activation_checkpointing", "offload"):
        del kept["train"][key]
    if not trains_together(config):
        del kept["train"]["switch_every"]  # whose turn it is moves no bit of blocks that share nothing
    return without_later(kept)


# Settings that came after the first runs of record, with the value that means what those runs did. At that value they are no
# part of a run's identity, so a new setting neither renames finished runs nor parts their records from those of later ones.
LATER = {
    "data": {"crop": 0, "randaugment": False},
    "train": {"init_from": None, "init_layers": "slice", "switch_every": 1},
}


def without_later(identity: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's identity without the settings that came later and that change nothing in it."""
    return {
        group: {key: value for key, value in settings.items() if LATER.get(group, {}).get(key, REQUIRED) != value}
        if isinstance(settings, dict)
        else settings
        for group, settings in identity.items()
    }


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


def job_config(config: Config, block: int) -> Config:
    """Returns the configuration of the job that trains one of a configuration's blocks alone."""
    folder = None if config.folder is None else f"{config.folder}_block_{block}"
    return dataclasses.replace(config, folder=folder, train=dataclasses.replace(config.train, blocks=[block]))


def job_folders(config: Config) -> list[Path]:
    """Returns the folders of the jobs that train a configuration's blocks one by one."""
    return [run_folder(job_config(config, block)) for block in owned_blocks(config)]


# The dataclass of each group that has several, by the name of the group, or of the model.
CLASSES = {
    "data": lambda plain: (
        TextConfig
        if plain["model"]["name"] in LANGUAGE_MODELS
        else LatentsConfig
        if plain["data"]["name"] in LATENTS
        else DataConfig
    ),
    "model": lambda plain: {
        "dit": ModelConfig,
        "vit": ViTConfig,
        "noprop_cnn": CNNConfig,
        "transformer": TransformerConfig,
        "recurrent": RecurrentConfig,
    }[plain["model"]["name"]],
    "objective": lambda plain: {
        "edm": ObjectiveConfig,
        "labels": LabelConfig,
        "next_token": NextTokenConfig,
        "token_diffusion": TokenDiffusionConfig,
        "masked": MaskedConfig,
    }[plain["objective"]["name"]],
    "sampler": lambda plain: TextSamplerConfig if plain["model"]["name"] in LANGUAGE_MODELS else SamplerConfig,
    "eval": lambda plain: TextEvalConfig if plain["model"]["name"] in LANGUAGE_MODELS else EvalConfig,
}


def save_config(config: Config, path: Path) -> None:
    """Writes a resolved configuration as YAML, in one move."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    os.replace(temporary, path)


def load_config(path: Path) -> Config:
    """Reads a configuration that save_config wrote.

    Raises:
        SettingError: no such file, or keys that this code does not know.
    """
    require(path.is_file(), f"{path} is missing: a run's folder holds the configuration that trained it")
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
        classes = {name: choose(plain) for name, choose in CLASSES.items()}
        for item in dataclasses.fields(Config):
            if item.name in classes:
                plain[item.name] = classes[item.name](**plain[item.name])
            elif dataclasses.is_dataclass(item.type):
                plain[item.name] = item.type(**plain[item.name])
        return Config(**plain)
    except (TypeError, KeyError, AttributeError, OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(f"{path} is not a configuration of this version of the code: {reason}") from None
