"""Language, from settings to scores: text, objective, samples, results. The pipeline calls these for a language model."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import checkpoint
import config as configuration
import plots
import text_model
import text_scores
from config import Config, TextSamplerConfig, digest, require
from hardware import Hardware
from model import part_name, step_memory
from parallel import ALONE, World
from randomness import stream_seed
from text_data import TextData, TokenSource, TokenSplit, check_text, cut_rows, load_text, load_tokenizer
from text_model import LanguageModel, MaskedDiffusion, NextToken, TokenDiffusion
from text_sampler import generate

PREVIEW_SAMPLES = 4  # of the text that is drawn during training
TIMED_TOKENS = 8  # that stand for a whole text in mode=profile
KNOWN_TOKENS = 50_000_000  # a longer training text is not searched for its words


def check(config: Config) -> None:
    """Refuses what cannot work as far as it can be known without work: text, tokenizer, models behind scores."""
    check_text(config.data)
    if config.mode in ("run", "evaluate"):
        text_scores.check_scores(config.eval.features, config.eval.perplexity, config.sampler.num_samples)
    trained = checkpoint.read_run(configuration.run_folder(config))
    if trained is not None:
        check_tokenizer(config, trained["data"]["fingerprint"])


def check_tokenizer(config: Config, fingerprint: str) -> None:
    """Refuses another tokenizer than the one of the data on which a model was trained, named by their fingerprint."""
    require(
        load_tokenizer(config.data.tokenizer).fingerprint[:16] == fingerprint.partition("/")[0],
        f"data.tokenizer={config.data.tokenizer} is another one now than when {configuration.run_folder(config)} was trained",
    )


def load(config: Config) -> TextData:
    """Loads text and tokens, and checks that there is what generated text begins with and is compared with."""
    data = load_text(config.data)
    if config.mode in ("run", "evaluate") and scores_generated(config):
        beginnings(data, config.sampler)
    return data


def scores_generated(config: Config) -> bool:
    """Returns whether text is generated to be scored."""
    return config.eval.words or config.eval.features is not None or len(config.eval.perplexity) > 0


def source(config: Config, data: TextData, device: torch.device) -> TokenSource:
    """Returns what gives each training step its batch."""
    return TokenSource(data, device, seed=config.seed)


def stand_in(config: Config) -> TextData:
    """Returns rows of random tokens for measurements that do not depend on what they say."""
    tokenizer, context = load_tokenizer(config.data.tokenizer), config.data.context
    count = 2 * config.train.batch_size
    tokens = np.random.default_rng(0).integers(0, tokenizer.size, count * context)
    split = TokenSplit(tokens, context * np.arange(1, count + 1), len(tokens))
    rows = cut_rows(split, context, config.data.packing, "random")
    return TextData("random", tokenizer, rows, rows, "")


def one_evaluation(
    config: Config, block: int, modules: Mapping[str, nn.Module], hardware: Hardware
) -> tuple[Callable[[], torch.Tensor], float]:
    """Returns what draws the first tokens of as many texts as a training step has, and how often that makes a whole text.

    Every block is given this one's network, of which all have the shape. Masked diffusion draws a row at once: there it is one
    step of it.
    """
    blocks = range(config.partition.num_blocks)
    model = build_model(config, {**modules, **{part_name(b): modules[part_name(block)] for b in blocks}}, 1.0, hardware)
    prompt, length = torch.zeros((config.train.batch_size, 0), dtype=torch.int64), config.sampler.length
    if config.objective.name == "masked":
        drawn, evaluations = dataclasses.replace(config.sampler, steps=1), (config.sampler.steps + 1) / 2
    else:
        drawn = dataclasses.replace(config.sampler, prompt=0, length=min(length, TIMED_TOKENS))
        evaluations = length / drawn.length
    return lambda: generate(model, prompt, drawn), evaluations


def trained_parts(config: Config, block: int) -> list[str]:
    """Returns the parts that a step of a block trains: the block, and the target embeddings where they are learned."""
    learned = config.objective.name == "token_diffusion" and config.objective.table == "learned"
    return [part_name(block), "shared"] if learned else [part_name(block)]


def build_module(config: Config, name: str) -> nn.Module:
    """Returns a part's module on the CPU, initialised from the stream (seed, "init/<part>") whatever else exists."""
    vocabulary = load_tokenizer(config.data.tokenizer).size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, f"init/{name}"))
        if name == "shared":
            return text_model.build_table(config, vocabulary)
        return text_model.build_network(config, vocabulary, configuration.layer_split(config)[int(name.removeprefix("block_"))])


def build_objective(config: Config) -> NextToken | TokenDiffusion | MaskedDiffusion:
    """Returns the objective that a configuration describes."""
    vocabulary = load_tokenizer(config.data.tokenizer).size
    return text_model.build_objective(config, configuration.levels(config), configuration.partition(config), vocabulary)


def build_model(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware) -> LanguageModel:
    """Returns a model to sample and score from, of parts' modules by name; `scale` is 1, tokens have no units."""
    return LanguageModel(config, build_objective(config), modules, hardware.autocast)


def plot_partition(config: Config, path: Path) -> None:
    """Draws density and intervals of sigma; masked shares are uniform, and a plain model has no levels."""
    objective = build_objective(config)
    if isinstance(objective, TokenDiffusion):
        intervals = [objective.interval(block) for block in range(objective.partition.num_blocks)]
        plots.plot_partition(objective.distribution, objective.partition.edges, intervals, path)


def preview(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware, path: Path) -> None:
    """Writes a few samples of a model in training."""
    model = build_model(config, modules, scale, hardware)
    prompt = torch.zeros((PREVIEW_SAMPLES, 0), dtype=torch.int64)
    path.with_suffix(".txt").write_text("\n\n".join(decode(config, generate(model, prompt, config.sampler))) + "\n")


def decode(config: Config, tokens: torch.Tensor) -> list[str]:
    """Returns texts of tokens (n, T)."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return [tokenizer.decode(row) for row in tokens.tolist()]


def beginnings(data: TextData, settings: TextSamplerConfig) -> torch.Tensor:
    """Returns held-out text, (n, prompt + length): what prompts are taken from, and what generated text is compared with."""
    count = settings.prompts or settings.num_samples
    return text_scores.excerpts(data.test, settings.prompt + settings.length, count, settings.seed)


def sample_sets(config: Config) -> tuple[()]:
    """Returns the sets of samples that several processes divide: none, the first draws all text."""
    return ()


def sample(
    config: Config,
    model: LanguageModel,
    weights: dict[str, Any],
    folder: Path,
    settings: TextSamplerConfig,
    world: World = ALONE,
) -> Path:
    """Draws the settings' texts and returns the path of the file that holds them; `weights` says what made them."""
    protocol = {"sampler": dataclasses.asdict(settings), **weights}
    target = folder / "samples" / f"text_{digest(protocol, 8)}"
    path = target / "samples.txt"
    if (target / "tokens.npy").is_file() or not world.first:
        return path
    target.mkdir(parents=True, exist_ok=True)
    prompt = torch.zeros((settings.num_samples, 0), dtype=torch.int64)
    if settings.prompt:
        pieces = beginnings(load(config), settings)[:, : settings.prompt]
        prompt = pieces[torch.arange(settings.num_samples) % len(pieces)]
    drawn = [
        generate(model, prompt[start : start + settings.batch_size], settings, start).cpu()
        for start in range(0, settings.num_samples, settings.batch_size)
    ]
    tokens = torch.cat(drawn)
    path.write_text("\n\n".join(decode(config, tokens)) + "\n")
    checkpoint.write_atomically(target / "protocol.json", json.dumps(protocol, indent=1) + "\n")
    temporary = target / "tokens.tmp.npy"
    np.save(temporary, tokens.numpy())
    os.replace(temporary, target / "tokens.npy")  # the last, in one move: where it is, the sample is whole
    return path


def measure(config: Config, modules: Mapping[str, nn.Module], data: TextData, hardware: Hardware) -> dict[str, float]:
    """Returns the likelihood of held-out text, or its bound, of a model in training."""
    return likelihood(config, data, build_model(config, modules, 1.0, hardware))["scores"]


def likelihood(config: Config, data: TextData, model: LanguageModel) -> dict[str, Any]:
    """Returns the likelihood of held-out text, or its bound, as a result."""
    settings = config.eval
    counts = {"count": settings.rows, "batch_size": settings.batch_size, "draws": settings.draws, "seed": settings.seed}
    return text_scores.likelihood(model, data.test, **counts)


def evaluate(
    config: Config, data: TextData, model: LanguageModel, weights: dict[str, Any], folder: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """Scores a trained model; returns results, each with `kind`, `title`, `scores` and `protocol`."""
    settings = config.eval
    results = [training_cost(config, data, model, folder), likelihood(config, data, model)]
    if isinstance(model.objective, TokenDiffusion):
        results.append(text_scores.embedding_result(model, data.train, settings.seed))
    if scores_generated(config):
        known = None
        if len(data.train.split.tokens) <= KNOWN_TOKENS:
            known = set(data.tokenizer.decode(data.train.split.tokens.tolist()).split())
        references = decode(config, beginnings(data, config.sampler))
        floor = generated_scores(config, references, None, known, hardware)
        results.append({"kind": "heldout_text", "title": "held-out text", **floor})
        for temperature in sorted({config.sampler.temperature, *settings.temperatures}):
            drawn = dataclasses.replace(config.sampler, temperature=temperature)
            path = sample(config, model, weights, folder, drawn)
            texts = decode(config, torch.from_numpy(np.load(path.parent / "tokens.npy")))
            scored = generated_scores(config, texts, references, known, hardware)
            protocol = {**scored["protocol"], "sampler": dataclasses.asdict(drawn)}
            result = {"kind": "generated_text", "title": f"temperature {temperature:g}", **scored, "protocol": protocol}
            results.append({**result, "texts": str(path.relative_to(folder))})
    return results


def generated_scores(
    config: Config, texts: list[str], references: list[str] | None, known: set[str] | None, hardware: Hardware
) -> dict[str, dict[str, Any]]:
    """Returns scores and protocol of texts, prompts included.

    Args:
        references: what MAUVE compares with; None for the references themselves.
        known: words of the training text.
    """
    settings = config.eval
    scores, protocol = {}, {"texts": len(texts), "scored": "prompt and continuation"}
    if settings.words:
        scores |= text_scores.word_scores(texts, known)
    for name in settings.perplexity:
        scores[f"perplexity_{Path(name).name}"] = text_scores.generative_perplexity(texts, name, hardware.device)
    if settings.features is not None and references is not None:
        clusters = {"scaling": settings.mauve_scaling, "buckets": settings.mauve_buckets, "seeds": settings.mauve_seeds}
        found, described = text_scores.mauve_result(texts, references, settings.features, hardware.device, **clusters)
        scores, protocol = scores | found, protocol | described
    return {"scores": scores, "protocol": protocol}


def training_cost(config: Config, data: TextData, model: LanguageModel, folder: Path) -> dict[str, Any]:
    """What training costs: bytes that a step holds, the largest over the blocks, seconds, and what can be counted.

    Token embeddings and heads stand apart: with many tokens they outweigh a block.
    """
    size = config.train.batch_size
    trained = [trained_parts(config, block) for block in range(configuration.trained_blocks(config))]
    batches = source(config, data, model.device)
    state, activations = step_memory(model.objective, model.modules, trained, batches, size, model.autocast)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(row["seconds"] for row in {row["block"]: row for row in rows}.values())
    counted = counted_cost(config)
    return {
        "kind": "training_cost",
        "title": "training",
        "scores": {
            **counted,
            "state_bytes": max(state) - counted["embedding_bytes"],
            "activation_bytes": max(activations),
            "seconds": seconds,
        },
        "protocol": {
            "metric": "memory that a step holds, without token embeddings; time of all steps; layers: forward 1, backward 2",
            "batch_size": size,
        },
    }


def counted_cost(config: Config) -> dict[str, float]:
    """Returns what training costs by counting.

    Layer passes count 1 forward and 2 backward, per token of the text; token-layers are those over all steps. Embedding bytes:
    parameters, gradients, AdamW's moments and EMA, in float32, of one block's token embedding and head.
    """
    model, train = config.model, config.train
    part = build_module(config, part_name(0))
    apart = [part.tokens, *([] if part.head.linear is None else [part.head.linear])]
    embeddings = sum(value.numel() for module in apart for value in module.parameters())
    layers = 3.0 * configuration.layer_split(config)[0]
    if model.name == "recurrent" and config.objective.name == "next_token":
        repeated = model.recurrence + 1  # 1 + Poisson; the chance of fewer than are backpropagated is left out
        layers = 3.0 * (model.prelude + model.coda) + model.core * (repeated + 2.0 * min(repeated, model.backpropagated))
    elif config.objective.name == "token_diffusion" and config.objective.layout == "concat":
        layers *= 2
    tokens = float(configuration.total_steps(config)) * train.batch_size * config.data.context
    return {
        "tokens": tokens,
        "layer_passes_per_token": layers,
        "token_layers": tokens * layers,
        "parameters": sum(value.numel() for value in part.parameters()) - embeddings,
        "embedding_parameters": embeddings,
        "embedding_bytes": 4.0 * 5 * embeddings,
    }
