"""Fine-tunes a diffusers transformer block by block: LoRA or all weights, through accelerate.

    python -m experiments.finetune pipeline=stabilityai/stable-diffusion-3.5-medium samples=photos blocks.layers_per_block=6
    python -m experiments.finetune ... blocks_to_train=[0] folder=runs/a   one block alone, on another machine for example
    python -m experiments.finetune ... merge.runs=[runs/a,runs/b] folder=runs/all  joins such jobs, to the bit
    accelerate launch -m experiments.finetune ...                          several processes, each a share of every batch

`samples` is a folder: images with captions (metadata.jsonl of file_name and text) or in a folder per label, or embeddings that
were computed before. Those are *.safetensors whose tensors are named by the arguments of the transformer's forward, one row per
sample and the clean sample under forward's first argument, with arguments that do not vary in arguments.json.
"""

import dataclasses
import hashlib
import inspect
import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

import checkpoint
import hardware as machine
from checkpoint import Part
from config import REQUIRED, MergeConfig, SettingError, TrainConfig, at_least, one_of, require
from convert import SHARED, UNBATCHED_ARGUMENTS, Blocks, ConvertConfig, convert, time_argument
from data import step_indices
from dblock_modules import LevelDistribution, Partition
from hardware import Hardware
from model import Batch, Draw, expand, part_name
from parallel import ALONE, WAIT_LIMIT, World
from randomness import generator, stream_seed
from train import Metrics, NonFiniteLoss, Stopped, stop_signals, train_step, update_order

# What a pipeline's encode_prompt returns, as arguments of its transformer's forward.
PROMPT_OUTPUTS = {
    "StableDiffusion3Pipeline": ("encoder_hidden_states", None, "pooled_projections", None),
    "FluxPipeline": ("encoder_hidden_states", "pooled_projections", "txt_ids"),
    "PixArtAlphaPipeline": ("encoder_hidden_states", "encoder_attention_mask", None, None),
    "PixArtSigmaPipeline": ("encoder_hidden_states", "encoder_attention_mask", None, None),
    "SanaPipeline": ("encoder_hidden_states", "encoder_attention_mask", None, None),
    "Lumina2Pipeline": ("encoder_hidden_states", "encoder_attention_mask", None, None),
}
LISTED_ARGUMENTS = {"x", "cap_feats", "img_shapes"}  # of which forward takes a list with an entry per sample
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MEASURED_STEPS = 3


@dataclass
class FinetuneConfig:
    """One fine-tuning job."""

    pipeline: str = REQUIRED  # a folder or a hub name of a diffusers pipeline
    samples: str = REQUIRED  # a folder, see above
    blocks: ConvertConfig = field(default_factory=ConvertConfig)
    blocks_to_train: Any = "all"  # or a list: this job trains these blocks only
    train_shared: bool = False  # this job owns embeddings, norms and head too; one job at most may
    lora_rank: int | None = 8  # null: all weights
    lora_targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    image_size: int = 512  # images are cropped to a square and resized to this
    steps: int = 1000  # per block
    batch_size: int = 8  # of all processes together
    micro_batch: int | None = None  # gradient accumulation, per process; null: all at once
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    checkpointing: bool = False  # recompute activations in backward
    precision: str = "auto"  # auto | fp32 | bf16
    checkpoint_every: int = 500  # steps of all blocks together
    merge: MergeConfig = field(default_factory=MergeConfig)  # with runs: they are joined in `folder`, instead of training
    measure: bool = True  # print peak memory and step time, with blocks and without, at the end
    folder: str = "runs/finetune"
    seed: int = 0
    device: str = "auto"
    threads: int | None = None


def validate(config: FinetuneConfig) -> None:
    """Refuses settings that cannot work; what needs the model or the data is checked where those are opened."""
    for name in ("steps", "batch_size", "image_size", "checkpoint_every"):
        at_least(name, getattr(config, name), 1)
    for name in ("lora_rank", "micro_batch"):
        require(getattr(config, name) is None or getattr(config, name) >= 1, f"{name}={getattr(config, name)} must be at least 1")
    require(config.learning_rate > 0, f"learning_rate={config.learning_rate} must be above 0")
    require(config.clip_norm is None or config.clip_norm > 0, f"clip_norm={config.clip_norm} must be above 0, or null")
    at_least("weight_decay", config.weight_decay, 0)
    one_of("precision", config.precision, ("auto", "fp32", "bf16"))
    require(config.threads is None or config.threads >= 1, f"threads={config.threads} must be at least 1")
    chosen = config.blocks_to_train
    require(chosen == "all" or isinstance(chosen, list), f"blocks_to_train={chosen} is neither all nor a list such as [0,2]")


def train_settings(config: FinetuneConfig) -> TrainConfig:
    """Returns the training loop's settings; its EMA follows the weights at once, so both are the same."""
    return TrainConfig(
        batch_size=config.batch_size,
        micro_batch=config.micro_batch,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        ema_half_life=0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Data


@dataclass
class EmbeddedData:
    """Samples in memory, as arguments of a transformer's forward; what the training loop asks for batches.

    Attributes:
        tensors: (N, ...) per argument, the clean sample first.
        constants: arguments that do not vary.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    device: torch.device
    seed: int

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Returns some rows of a step's batch."""
        count = len(next(iter(self.tensors.values())))
        indices = torch.from_numpy(step_indices(self.seed, block, step, batch_size, count)[rows])
        return tuple(tensor[indices].to(self.device) for tensor in self.tensors.values())

    def prefetch(self, block: int, step: int, batch_size: int) -> None:
        """Does nothing: everything is in memory."""

    def fingerprint(self) -> str:
        """Returns a hash of all samples."""
        total = hashlib.sha256(json.dumps(self.constants, default=str, sort_keys=True).encode())
        for name, tensor in self.tensors.items():
            total.update(name.encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy())
        return total.hexdigest()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """The context in which a file is read: what cannot be read is a wrong setting that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, SafetensorError, yaml.YAMLError) as error:
        raise SettingError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def read_embeddings(folder: Path, transformer: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and constants of a folder of embeddings.

    Raises:
        SettingError: names that forward does not have, no clean samples, or numbers of samples that differ.
    """
    arguments = list(inspect.signature(transformer.forward).parameters)
    parts: list[dict[str, Tensor]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with readable(path):
            part = load_file(path)
        parts.append({name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in part.items()})
        alike = {name: tensor.shape[1:] for name, tensor in parts[0].items()} == {
            name: tensor.shape[1:] for name, tensor in part.items()
        }
        require(alike, f"{path} holds other tensors than the files before it, or samples of other shapes")
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in UNBATCHED_ARGUMENTS}
    constants = {name: tensor for name, tensor in parts[0].items() if name in UNBATCHED_ARGUMENTS}
    path = folder / "arguments.json"
    with readable(path):
        constants |= dict(json.loads(path.read_text())) if path.is_file() else {}
    unknown = sorted((tensors.keys() | constants.keys()) - set(arguments))
    require(not unknown, f"samples={folder}: {type(transformer).__name__}.forward has no {', '.join(unknown)}")
    sample = arguments[0]
    require(sample in tensors, f"samples={folder} has no {sample}: the clean samples")
    counts = {name: len(tensor) for name, tensor in tensors.items()}
    require(len(set(counts.values())) == 1, f"samples={folder}: the numbers of samples differ: {counts}")
    require(counts[sample] > 0, f"samples={folder} holds no samples")
    return {sample: tensors.pop(sample), **tensors}, constants


def find_images(folder: Path) -> tuple[list[Path], list[str] | None, list[int] | None]:
    """Returns the images of a folder with their captions, or with their labels: the number of the subfolder in order of names.

    Raises:
        SettingError: neither.
    """
    listing = folder / "metadata.jsonl"
    if listing.is_file():
        with readable(listing):
            rows = [dict(json.loads(line)) for line in listing.read_text().splitlines() if line.strip()]
        missing = [row for row in rows if not {"file_name", "text"} <= row.keys() or not (folder / row["file_name"]).is_file()]
        require(
            len(rows) > 0 and not missing, f"{listing}: each line needs the file_name of an image and its text: {missing[:1]}"
        )
        return [folder / row["file_name"] for row in rows], [row["text"] for row in rows], None
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES)
    require(len(paths) > 0, f"samples={folder} holds no *.safetensors, no metadata.jsonl and no images in a folder per label")
    names = sorted({path.parent.name for path in paths})
    return paths, None, [names.index(path.parent.name) for path in paths]


def read_image(path: Path, size: int) -> Tensor:
    """Returns (3, size, size) pixels in [-1, 1] of an image's central square."""
    with readable(path), Image.open(path) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.convert("RGB").resize((size, size), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1) / 127.5 - 1


@torch.no_grad()
def encode_images(pipe: DiffusionPipeline, folder: Path, size: int, batch_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a folder of images as arguments of the pipeline's transformer, by the pipeline's own encoders.

    Raises:
        SettingError: captions for a pipeline whose encode_prompt is not known here.
    """
    paths, captions, labels = find_images(folder)
    kind = type(pipe).__name__
    require(captions is None or kind in PROMPT_OUTPUTS, f"samples={folder}: captions for {kind} have to be embedded before")
    columns: dict[str, list[Tensor]] = {}
    constants: dict[str, Any] = {}
    for start in range(0, len(paths), batch_size):
        part = slice(start, start + batch_size)
        pixels = torch.stack([read_image(path, size) for path in paths[part]]).to(pipe.vae.device, pipe.vae.dtype)
        encoded = pipe.vae.encode(pixels)
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        latents = (latents - (getattr(pipe.vae.config, "shift_factor", None) or 0.0)) * pipe.vae.config.scaling_factor
        values: dict[str | None, Tensor] = {"hidden_states": latents}
        if captions is None:
            values["class_labels"] = torch.tensor(labels[part])
        else:
            known = inspect.signature(pipe.encode_prompt).parameters
            more = {name: value for name, value in (("prompt_2", None), ("prompt_3", None)) if name in known}
            more |= {"do_classifier_free_guidance": False} if "do_classifier_free_guidance" in known else {}
            outputs = pipe.encode_prompt(prompt=captions[part], **more)
            values |= dict(zip(PROMPT_OUTPUTS[kind], outputs, strict=False))
        if kind == "FluxPipeline":
            count, channels, height, width = latents.shape
            values["hidden_states"] = pipe._pack_latents(latents, count, channels, height, width)
            ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, latents.device, latents.dtype)
            constants |= {"img_ids": ids, "txt_ids": values.pop("txt_ids")}
            if pipe.transformer.config.guidance_embeds:
                values["guidance"] = torch.ones(count)
        values.pop(None, None)
        for name, value in values.items():
            columns.setdefault(name, []).append(value.cpu())
    if kind.startswith("PixArt"):
        constants["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return {name: torch.cat(parts) for name, parts in columns.items()}, constants


def load_data(config: FinetuneConfig, pipe: DiffusionPipeline, device: torch.device) -> EmbeddedData:
    """Returns the training samples, embedded now where they are images."""
    folder = Path(config.samples)
    require(folder.is_dir(), f"samples={folder} is not a folder")
    if any(folder.glob("*.safetensors")):
        tensors, constants = read_embeddings(folder, pipe.transformer)
    else:
        tensors, constants = encode_images(pipe.to(device), folder, config.image_size, config.batch_size)
        pipe.to("cpu")  # the encoders have done their work
    constants = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in constants.items()}
    return EmbeddedData(tensors, constants, device, config.seed)


# ---------------------------------------------------------------------------------------------------------------------
# Objective


@dataclass(frozen=True)
class FinetuneObjective:
    """The scheduler's own training loss, at levels that are drawn inside a block's interval; see model.Objective.

    Flow matching (arXiv 2210.02747): x = (1 - level) data + level noise, and the model predicts noise - data, in the direction of
    its own clock. DDPM (arXiv 2006.11239): x = sqrt(abar) data + sqrt(1 - abar) noise.

    Attributes:
        names: the arguments of forward that a batch holds, in its order; the clean sample is the first.
        constants: arguments that do not vary.
    """

    blocks: Blocks
    scheduler: Any
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    seed: int

    @property
    def distribution(self) -> LevelDistribution:
        return self.blocks.distribution

    @property
    def partition(self) -> Partition:
        return self.blocks.partition

    def add_noise(self, x: Tensor, level: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the noisy samples (n, ...) and what the model is to predict of them."""
        level = expand(level, x)
        if self.blocks.clock.kind == "flow":
            z, target = (1 - level) * x + level * noise, noise - x
            return z.to(x), -target if self.blocks.config.clock.endswith("from_noise") else target
        steps = (level * self.blocks.clock.timesteps).round().long()
        alpha = self.scheduler.alphas_cumprod.to(x.device).double()[steps]
        z = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        kind = self.scheduler.config.prediction_type
        target = {"epsilon": noise, "sample": x, "v_prediction": alpha.sqrt() * noise - (1 - alpha).sqrt() * x}[kind]
        return z.to(x), target.to(x)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Any) -> Tensor:
        """Returns the loss per sample, (n,) float32, of the block that is drawn; modules are those that the step trains."""
        x, key = batch[0], (self.seed, draw.block, draw.step)
        uniform = torch.rand(draw.batch_size, dtype=torch.float64, generator=generator(key[0], "sigma", *key[1:]))
        noise = torch.randn((draw.batch_size, *x.shape[1:]), generator=generator(key[0], "noise", *key[1:]))[draw.rows].to(x)
        level = self.blocks.draw_levels(draw.block, uniform[draw.rows])
        z, target = self.add_noise(x, level.to(x.device), noise)
        transformer = self.blocks.transformer
        arguments = dict(zip(self.names, (z, *batch[1:]), strict=True)) | dict(self.constants)
        arguments[time_argument(transformer)] = self.blocks.timestep(level).to(x.device)
        for name in LISTED_ARGUMENTS & arguments.keys():
            arguments[name] = list(arguments[name]) if name in self.names else [arguments[name]] * len(x)
        with autocast or nullcontext(), self.blocks.training(draw.block):
            result = transformer(**arguments, return_dict=False)
        predicted = result if isinstance(result, Tensor) else result[0]  # Kandinsky 5 returns no tuple
        predicted = predicted if isinstance(predicted, Tensor) else torch.stack(predicted)
        predicted = predicted[:, : target.shape[1]] if target.ndim == 4 else predicted  # the rest is a learned variance
        return (predicted.float() - target.float()).square().flatten(1).mean(1)


# ---------------------------------------------------------------------------------------------------------------------
# The model and its parts


def load_pipeline(name: str) -> DiffusionPipeline:
    """Loads a diffusers pipeline from a folder or the hub.

    Raises:
        SettingError: there is none.
    """
    try:
        components = DiffusionPipeline.load_config(name)
        absent = [key for key, value in components.items() if value == [None, None]]  # as where prompts are embedded elsewhere
        pipe = DiffusionPipeline.from_pretrained(name, **dict.fromkeys(absent))
    except (OSError, ValueError) as error:
        raise SettingError(f"pipeline={name} is not a diffusers pipeline: {str(error).splitlines()[0]}") from None
    require(hasattr(pipe, "transformer"), f"pipeline={name} is a {type(pipe).__name__}, which has no transformer")
    return pipe


def make_blocks(config: FinetuneConfig, pipe: DiffusionPipeline) -> Blocks:
    """Converts the pipeline's transformer and adds adapters, which begin alike in every job of the same seed."""
    transformer = pipe.transformer.requires_grad_(config.lora_rank is None).train()
    options = {item.name: getattr(config.blocks, item.name) for item in dataclasses.fields(ConvertConfig)}
    blocks = convert(transformer, options.pop("layers_per_block"), scheduler=pipe.scheduler, **options)
    if config.lora_rank is not None:
        torch.manual_seed(stream_seed(config.seed, "lora"))
        lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_rank, target_modules=config.lora_targets)
        try:
            inject_adapter_in_model(lora, transformer)
        except ValueError as error:
            raise SettingError(f"lora_targets={config.lora_targets}: {error}") from None
    if config.checkpointing:
        transformer.enable_gradient_checkpointing()
    return blocks


def world_of(accelerator: Accelerator) -> World:
    """Returns the processes that were launched, as the training loop knows them."""
    if accelerator.num_processes == 1:
        return ALONE
    waits = dist.new_group(timeout=WAIT_LIMIT, backend="gloo")
    return World(accelerator.process_index, accelerator.num_processes, dist.group.WORLD, waits)


def average_gradients(transformer: nn.Module, world: World) -> None:
    """Lets the processes average every gradient as soon as it is there.

    DDP would have to search for unused parameters: the last layer of a block has some that nothing reads, such as those that
    update the text where only the image is an output.
    """

    def average(parameter: Tensor) -> None:
        world.add(parameter.grad).div_(world.size)

    if world.size > 1:
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)


def build_parts(config: FinetuneConfig, owned: Mapping[str, Mapping[str, nn.Parameter]]) -> dict[str, Part]:
    """Returns the parts that a job trains, each with an optimizer of its own."""
    parts = {}
    for name, parameters in owned.items():
        # A module that holds the parameters alone, whose names may not contain dots.
        module = nn.ParameterDict({key.replace(".", "/"): parameter for key, parameter in parameters.items()})
        # In the module's order, which ParameterDict sorts: the loop pairs the optimizer's parameters with their averages.
        optimizer = torch.optim.AdamW(module.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        parts[name] = Part(module, {key: value.detach().clone() for key, value in module.named_parameters()}, optimizer)
    return parts


def describe(config: FinetuneConfig, blocks: Blocks, fingerprint: str, hardware: Hardware) -> dict[str, Any]:
    """Returns what a checkpoint says of itself: resume and merge compare it and name what differs.

    `train.blocks` is what a job owns; merging leaves it out of the comparison, as it does whether the job owned the shared part.
    """
    versions = machine.environment()
    skipped = ("pipeline", "samples", "blocks", "blocks_to_train", "train_shared", "steps", "seed")
    skipped += ("checkpoint_every", "merge", "measure", "folder", "device", "threads")
    train = {key: value for key, value in dataclasses.asdict(config).items() if key not in skipped}
    return {
        "identity": {
            "pipeline": config.pipeline,
            "data": {"path": config.samples},
            "blocks": blocks.description(),
            "train": {**train, "steps": config.steps, "schedule": "constant", "blocks": config.blocks_to_train},
            "seed": config.seed,
        },
        "data": {"fingerprint": fingerprint},
        "commit": versions["commit"],
        "machine": {
            "precision": hardware.precision,
            "device": hardware.name,
            "threads": hardware.threads,
            **{name: versions[name] for name in ("torch", "python", "cpu")},
        },
    }


def blocks_to_train(config: FinetuneConfig, blocks: Blocks) -> list[int]:
    """Returns the blocks that this job owns."""
    return list(range(blocks.num_blocks)) if config.blocks_to_train == "all" else config.blocks_to_train


# ---------------------------------------------------------------------------------------------------------------------
# The job


def run(config: FinetuneConfig) -> Path:
    """Runs one job and returns its folder.

    Raises:
        SettingError: a setting that cannot work.
        NonFiniteLoss: a loss that is not finite.
    """
    validate(config)
    folder = Path(config.folder)
    if config.merge.runs:
        merge(config, folder)
        return folder
    hardware = machine.set_up(config.device, config.precision, config.threads)
    accelerator = Accelerator(cpu=hardware.device.type == "cpu")
    require(
        config.batch_size % accelerator.num_processes == 0,
        f"batch_size={config.batch_size} is not a multiple of the {accelerator.num_processes} processes",
    )
    device = accelerator.device if config.device == "auto" else hardware.device
    hardware = dataclasses.replace(hardware, device=device)
    pipe = load_pipeline(config.pipeline)
    world = world_of(accelerator)
    data = load_data(config, pipe, device)
    pipe.transformer.to(device)
    blocks = make_blocks(config, pipe)
    average_gradients(blocks.transformer, world)
    thawed = {name for name, parameter in blocks.transformer.named_parameters() if parameter.requires_grad}
    with checkpoint.locked(folder) if world.first else nullcontext():
        train(config, blocks, pipe.scheduler, data, folder, hardware, world)
    if config.measure:
        lines = measure(config, blocks, pipe, data, thawed, hardware, world)
        for line in lines if world.first else ():
            print(line)
    return folder


def train(
    config: FinetuneConfig,
    blocks: Blocks,
    scheduler: Any,
    data: EmbeddedData,
    folder: Path,
    hardware: Hardware,
    world: World,
) -> None:
    """Trains the job's blocks to their last step, from the checkpoint in `folder` if there is one."""
    owned = blocks_to_train(config, blocks)
    parts = build_parts(config, blocks.freeze(owned, config.train_shared))
    description = describe(config, blocks, data.fingerprint(), hardware)
    run_file = checkpoint.read_run(folder)
    if run_file is not None:
        for warning in checkpoint.check_resume(folder, description):
            tqdm.write(f"warning: {warning}")
        require(
            set(run_file["parts"]) == set(parts),
            f"train_shared={config.train_shared}: {folder} holds {', '.join(run_file['parts'])}",
        )
        for name, part in parts.items():
            checkpoint.restore(folder, run_file, name, part)
    objective = FinetuneObjective(blocks, scheduler, tuple(data.tensors), data.constants, config.seed)
    settings = train_settings(config)
    modules = {name: part.module for name, part in parts.items()}
    if world.first:
        write_config(config, folder)
    made = {block: parts[part_name(block)].step for block in owned}
    metrics = Metrics(folder / "metrics.jsonl", made, lambda row: None, keep=world.first)

    def save() -> None:
        for block in owned:
            metrics.write(block, parts[part_name(block)].step)
        checkpoint.save(folder, parts, description, world.first)
        world.wait()

    shares = [1.0] * blocks.num_blocks
    order = update_order(config.seed, "shuffled", shares, config.steps * blocks.num_blocks).tolist()
    todo = []
    for block in owned:
        made = parts[part_name(block)].step
        todo += [index for index, other in enumerate(order) if other == block][made:]
    todo = [order[index] for index in sorted(todo)]
    with stop_signals() as stop, tqdm(todo, unit="step", disable=not world.first) as bar:
        for count, block in enumerate(bar, 1):
            own = [parts[part_name(block)]] + ([parts[SHARED]] if SHARED in parts else [])
            metrics.add(block, train_step(settings, objective, data, modules, own, block, config.steps, hardware, world))
            stopped = world.agree(stop[0] if stop else 0)
            if stopped or count % config.checkpoint_every == 0:
                save()
            if stopped:
                raise Stopped(128 + stopped)
    save()


def merge(config: FinetuneConfig, folder: Path) -> None:
    """Joins jobs that trained different blocks into the folder that one job over all of them would have.

    Raises:
        SettingError: a block that is missing or there twice, the shared part twice, or jobs that do not belong together.
    """
    folders = [Path(path) for path in config.merge.runs]
    first = checkpoint.read_run(folders[0])
    require(first is not None, f"merge.runs: {folders[0]} holds no checkpoint")
    identity = {**first["identity"], "train": {**first["identity"]["train"], "blocks": "all"}}
    steps = {part_name(block): identity["train"]["steps"] for block in range(len(identity["blocks"]["layers"]))}
    for run_file in map(checkpoint.read_run, folders):
        if run_file is not None and SHARED in run_file["parts"]:
            steps[SHARED] = run_file["parts"][SHARED]["step"]  # a step of each block that its job trained
    owners = checkpoint.check_merge(folders, folder, identity, steps, config.merge.force, config.merge.replace)
    with checkpoint.locked(folder):
        merged = dataclasses.replace(
            read_config(folders[0]), blocks_to_train="all", train_shared=SHARED in owners, folder=str(folder)
        )
        write_config(merged, folder)
        checkpoint.merge(owners, folder, identity)


def write_config(config: FinetuneConfig, folder: Path) -> None:
    """Writes the configuration of a job into its folder."""
    checkpoint.write_atomically(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def read_config(folder: Path) -> FinetuneConfig:
    """Returns the configuration of a job's folder."""
    path = folder / "config.yaml"
    require(path.is_file(), f"{path} is missing: is {folder} the folder of a fine-tuning job?")
    with readable(path):
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(FinetuneConfig), OmegaConf.load(path)))


def load(folder: str | Path, force: bool = False) -> DiffusionPipeline:
    """Returns the pipeline with the blocks that a job or a merge trained, ready to draw.

    Args:
        force: also where some blocks were not trained.

    Raises:
        SettingError: no checkpoint, blocks that were not trained, or blocks that are cut in another way now.
    """
    folder = Path(folder)
    run_file = checkpoint.read_run(folder)
    require(run_file is not None, f"{folder} holds no checkpoint")
    config = read_config(folder)
    pipe = load_pipeline(config.pipeline)
    blocks = make_blocks(config, pipe)
    ours = json.loads(json.dumps(blocks.description()))
    found = checkpoint.differences(ours, run_file["identity"]["blocks"], "blocks")
    require(not found, f"{folder}: {'; '.join(found[:3])}")
    parameters = dict(blocks.transformer.named_parameters())
    for name in run_file["parts"]:
        for key, value in checkpoint.load_weights(folder, run_file, name, "raw").items():
            parameters[key.replace("/", ".")].data.copy_(value)
        if name != SHARED:
            blocks.trained.add(int(name.removeprefix("block_")))
    blocks.remember()
    blocks.transformer.eval()
    return blocks.attach(pipe, force)


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


class SavedBytes:
    """Counts the bytes that autograd keeps for backward, each storage once, parameters not.

    Attributes:
        now: kept at this moment.
        most: kept at any moment.
    """

    def __init__(self, model: nn.Module) -> None:
        self.now = self.most = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._holders: Counter[int] = Counter()

    def count(self) -> AbstractContextManager:
        """Returns the context in which forwards are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda held: held.tensor)

    def _keep(self, tensor: Tensor) -> "_Held":
        held, storage = _Held(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._move(storage.data_ptr(), storage.nbytes(), 1)
            weakref.finalize(held, self._move, storage.data_ptr(), storage.nbytes(), -1)
        return held

    def _move(self, place: int, size: int, holders: int) -> None:
        before = self._holders[place] > 0
        self._holders[place] += holders
        self.now += size * ((self._holders[place] > 0) - before)
        self.most = max(self.most, self.now)


@dataclass(eq=False)
class _Held:
    tensor: Tensor


def measure(
    config: FinetuneConfig,
    blocks: Blocks,
    pipe: DiffusionPipeline,
    data: EmbeddedData,
    thawed: Iterable[str],
    hardware: Hardware,
    world: World,
) -> list[str]:
    """Returns lines with peak memory and step time of the job's first block and of the whole depth, trained in the same way.

    The weights move a few steps on: the job's own are in its checkpoint by now.
    """
    lines = [measure_block("with blocks", config, blocks, pipe, data, blocks_to_train(config, blocks)[:1], hardware, world)]
    transformer = blocks.undo(force=True)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name in thawed)
    whole = convert(
        transformer, blocks.depth, scheduler=pipe.scheduler, clock=blocks.config.clock, block_paths=list(blocks.lists)
    )
    lines.append(measure_block("without blocks", config, whole, pipe, data, [0], hardware, world))
    whole.undo(force=True)
    return lines


def measure_block(
    title: str,
    config: FinetuneConfig,
    blocks: Blocks,
    pipe: DiffusionPipeline,
    data: EmbeddedData,
    owned: list[int],
    hardware: Hardware,
    world: World,
) -> str:
    """Returns a line with the peak memory and the step time of training one block."""
    parts = build_parts(config, blocks.freeze(owned))
    objective = FinetuneObjective(blocks, pipe.scheduler, tuple(data.tensors), data.constants, config.seed)
    settings = train_settings(config)
    own = list(parts.values())
    on_gpu = hardware.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(hardware.device)
    seconds = []
    kept = SavedBytes(blocks.transformer)
    try:
        for _ in range(MEASURED_STEPS):
            started = time.perf_counter()
            with nullcontext() if on_gpu else kept.count():  # the GPU's own count has everything in it
                train_step(settings, objective, data, {}, own, owned[0], config.steps, hardware, world)
            if on_gpu:
                torch.cuda.synchronize(hardware.device)
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return f"{title}: does not fit"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(hardware.device)
    else:
        trained = sum(p.nbytes for p in blocks.transformer.parameters() if p.requires_grad)
        # weights; gradients, EMA and two moments of what is trained; activations
        memory = sum(p.nbytes for p in blocks.transformer.parameters()) + 4 * trained + kept.most
    return f"{title}: peak memory {memory / 2**20:.2f} MiB, {min(seconds) * 1000:.1f} ms a step"


store = ConfigStore.instance()
store.store("finetune_schema", FinetuneConfig)


@hydra.main(config_path="../configs", config_name="finetune", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Runs one configuration: one line and a non-zero exit where a setting cannot work."""
    try:
        missing = OmegaConf.missing_keys(composed)
        require(not missing, f"{', '.join(sorted(missing))} must be set")
        run(OmegaConf.to_object(composed))
    except (SettingError, NonFiniteLoss) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
