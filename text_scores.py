"""Scores of language models: likelihood from the model itself, and what generated text is like.

Likelihoods are in nats per token or bits per character, of every held-out token once. A number says nothing without how it was
measured, so what is random in an estimate is in its protocol.
"""

import importlib.metadata
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import SettingError, require
from data import step_indices
from randomness import generator
from text_data import Rows, check_hub, reason
from text_model import LanguageModel, MaskedDiffusion, NextToken, TokenDiffusion, token_losses

GIVEN_AWAY_DRAWS = 2000  # tokens whose noisy embeddings are drawn to tell what they give away
DISTINCT = (1, 2, 3)
REPEATED = 4  # words in a row that were there before in the same sample


# ---------------------------------------------------------------------------------------------------------------------
# Likelihood


class Cells(NamedTuple):
    """Levels cut into cells, and what each has of a quantity; together they are the whole."""

    edges: list[float]  # ascending, one more than cells
    nats: list[float]  # per token
    block: list[int]


def held_out(
    rows: Rows, count: int | None, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor, range]]:
    """Yields the first rows in batches: tokens, documents, counts (each n, T), and the rows' numbers."""
    total = len(rows) if count is None else min(count, len(rows))
    for start in range(0, total, batch_size):
        numbers = range(start, min(start + batch_size, total))
        tokens, documents, counts = rows.take(np.array(numbers))
        yield tokens.to(device), documents.to(device), counts.to(device), numbers


def row_draws(seed: int, purpose: str, numbers: range, *shape: int, normal: bool = False) -> Tensor:
    """Returns random numbers of held-out rows, (n, *shape) float64, from a stream of each row: any batch size agrees."""
    draw = torch.randn if normal else torch.rand
    return torch.stack([draw(shape, dtype=torch.float64, generator=generator(seed, purpose, number)) for number in numbers])


@torch.no_grad()
def next_token_nats(model: LanguageModel, rows: Rows, count: int | None, batch_size: int, seed: int) -> float:
    """Returns the exact cross-entropy of the plain model, nats per token.

    A recurrent model repeats its core as often as its setting says, from a random state.
    """
    objective, network = model.objective, model.network(0)
    total, tokens_seen = 0.0, 0
    for tokens, documents, counts, numbers in held_out(rows, count, batch_size, model.device):
        repeats = {}
        if objective.recurrence:
            shape = (tokens.shape[1], network.tokens.embedding_dim)
            state = torch.stack([objective.start_state(shape, "heldout_state", seed, i, device="cpu") for i in numbers])
            repeats = {"state": state.to(model.device), "with_gradient": round(objective.recurrence)}
        total += (objective.losses(network, tokens, documents, model.autocast(), **repeats) * counts).sum().item()
        tokens_seen += int(counts.sum())
    return total / tokens_seen


@torch.no_grad()
def masked_nats(
    model: LanguageModel, rows: Rows, count: int | None, batch_size: int, draws: int, seed: int
) -> tuple[Cells, dict[str, float]]:
    """Estimates masked diffusion's bound on the negative log-likelihood, nats per token.

    -log p(x) <= integral over t of E[-alpha'/(1 - alpha) * cross-entropy of the hidden tokens] + reconstruction + prior (MD4
    equations 4 and 7). The integral is a sum over the blocks' own intervals, which are disjoint: overlap is for training alone.
    Each interval is cut into `draws` cells of equal width, and every row has one draw of t in each: one uniform number per row,
    shifted from row to row by equal steps (antithetic). Reconstruction: of the tokens that are hidden at t = 0, at ln V each. The
    prior term is 0, since at t = 1 nothing is told apart from the mask but a share epsilon.

    Returns:
        The integral by cells, and the other terms.
    """
    objective = model.objective
    partition, vocabulary = objective.partition, objective.vocabulary
    sums, tokens_seen = np.zeros((partition.num_blocks, draws)), 0
    total_rows = len(rows) if count is None else min(count, len(rows))
    for tokens, documents, counts, numbers in held_out(rows, count, batch_size, model.device):
        tokens_seen += int(counts.sum())
        for block in range(partition.num_blocks):
            low, high = partition.interval(block)
            width = (high - low) / draws
            for cell in range(draws):
                offset = torch.rand((), dtype=torch.float64, generator=generator(seed, "heldout_t", block, cell))
                shares = (offset + torch.tensor(numbers, dtype=torch.float64) / total_rows) % 1
                t = (low + width * (cell + shares)).to(model.device)
                uniform = row_draws(seed + cell + draws * block, "heldout_mask", numbers, tokens.shape[1]).to(model.device)
                losses = objective.losses(model.network(block), tokens, documents, t, uniform, model.autocast())
                sums[block, cell] += width * (losses * counts).sum(dtype=torch.float64).item()
    hidden = 1 - float(objective.alpha(torch.zeros((), dtype=torch.float64)))
    return cells_of(model, sums / tokens_seen, logarithmic=False), {
        "reconstruction": hidden * math.log(vocabulary),
        "prior": 0.0,
    }


@torch.no_grad()
def diffusion_nats(
    model: LanguageModel, rows: Rows, count: int | None, batch_size: int, draws: int, seed: int
) -> tuple[Cells, dict[str, float]]:
    """Estimates the variational bound of token diffusion on the negative log-likelihood, nats per token.

    The likelihood of a text is the product over its tokens given those before. For one token with target embedding e of norm 1,
    let z_s = e + s * eps. The model starts from N(0, sigma_max^2), goes down by the reverse of this noising with the denoiser D
    in the place of e, and at sigma_min draws the token from the network's prediction. For steps that become small the bound of
    Kingma et al. (Variational Diffusion Models, arXiv 2107.00630, equations 11 and 17, with signal-to-noise ratio 1 / s^2) is

        -log p(x) <= ||e||^2 / (2 sigma_max^2)  +  integral E||e - D(z_s; s)||^2 / s^2 d(ln s)  +  E[-log p(x | z_sigma_min)]
                     prior                         from sigma_min to sigma_max                     reconstruction

    which holds for any D, so for D the expected embedding under a block's prediction, whichever block it is: the integral is a
    sum over the blocks' own, disjoint intervals. It is the likelihood of the stochastic sampler with many steps, not of Euler's
    deterministic steps; temperature 1. The bound is tight where D is the posterior mean of some prior over tokens.

    Each interval is cut into `draws` cells of equal width in ln s, and each token has one draw of s and noise in each. In the
    `inline` layout the tokens before have noisy embeddings of their own, of the same cell's levels: the bound is that of a
    sampler which keeps them so. The noise is drawn in float64, levels and coefficients too.

    Returns:
        The integral by cells, and the other terms; `cross_entropy_sigma_max` is no term of the bound but the cross-entropy at the
        highest level, where the noisy embedding tells nothing: that of the model as a next-token model.
    """
    objective = model.objective
    partition = objective.partition
    table = objective.table(model.modules, model.device)  # (V, D)
    lowest, highest = objective.distribution.minimum, objective.distribution.maximum
    sums, ends, tokens_seen = np.zeros((partition.num_blocks, draws)), {lowest: 0.0, highest: 0.0}, 0

    def predict(block: int, tokens: Tensor, documents: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        z = table[tokens] + (sigma[..., None] * noise).float()  # (n, T, D)
        return objective.logits(model.network(block), z, sigma, tokens, documents, model.autocast()).float()  # (n, T, V)

    for tokens, documents, counts, numbers in held_out(rows, count, batch_size, model.device):
        tokens_seen += int(counts.sum())
        for block in range(partition.num_blocks):
            low, high = partition.interval(block)
            for cell in range(draws):
                stream = seed + cell + draws * block
                position = row_draws(stream, "heldout_sigma", numbers, tokens.shape[1]).to(model.device)
                noise = row_draws(stream, "heldout_noise", numbers, tokens.shape[1], table.shape[1], normal=True).to(model.device)
                sigma = low * (high / low) ** ((cell + position) / draws)  # (n, T)
                denoised = predict(block, tokens, documents, sigma, noise).softmax(-1) @ table  # (n, T, D)
                error = (table[tokens] - denoised).double().square().sum(-1) / sigma.square()  # (n, T)
                sums[block, cell] += math.log(high / low) / draws * (error * counts).sum().item()
        for level in ends:
            noise = row_draws(seed, "heldout_end", numbers, tokens.shape[1], table.shape[1], normal=True).to(model.device)
            sigma = torch.full(tokens.shape, level, dtype=torch.float64, device=model.device)
            losses = token_losses(predict(partition.block_of(level), tokens, documents, sigma, noise), tokens)
            ends[level] += (losses * counts).sum(dtype=torch.float64).item()
    return cells_of(model, sums / tokens_seen, logarithmic=True), {
        "reconstruction": ends[lowest] / tokens_seen,
        "prior": 1 / (2 * highest**2),
        "cross_entropy_sigma_max": ends[highest] / tokens_seen,
    }


def cells_of(model: LanguageModel, nats: np.ndarray, logarithmic: bool) -> Cells:
    """Returns cells from the lowest level up, of nats by block (noisiest first) and cell (lowest first)."""
    partition, draws = model.objective.partition, nats.shape[1]
    found = Cells([partition.edges[-1]], [], [])
    for block in reversed(range(partition.num_blocks)):
        low, high = partition.interval(block)
        space = np.geomspace if logarithmic else np.linspace
        edges = space(low, high, draws + 1)
        edges[[0, -1]] = low, high
        found.edges.extend(edges[1:].tolist())
        found.nats.extend(nats[block].tolist())
        found.block.extend([block] * draws)
    return found


def likelihood(model: LanguageModel, rows: Rows, *, count: int | None, batch_size: int, draws: int, seed: int) -> dict[str, Any]:
    """Returns a model's likelihood of held-out text, or its bound, as a result: bits per character, nats by token and block."""
    objective = model.objective
    whole = count is None or count >= len(rows)
    counted = int(rows.counted.sum() if whole else rows.counted[:count].sum())
    protocol = {"rows": len(rows) if whole else count, "tokens": counted, "split": "test", "context": rows.context, "seed": seed}
    per_token = rows.split.characters / int(rows.counted.sum())  # characters
    if isinstance(objective, NextToken):
        nats = next_token_nats(model, rows, count, batch_size, seed)
        metric = f"exact, {round(objective.recurrence)} repetitions of the core" if objective.recurrence else "exact"
        scores = {"nats_per_token": nats, "bits_per_character": bits(nats, per_token)}
        return {"kind": "likelihood", "title": "likelihood", "scores": scores, "protocol": {"metric": metric, **protocol}}
    estimate = masked_nats if isinstance(objective, MaskedDiffusion) else diffusion_nats
    cells, terms = estimate(model, rows, count, batch_size, draws, seed)
    blocks = range(objective.partition.num_blocks)
    by_block = {f"nats_block_{b}": sum(n for n, owner in zip(cells.nats, cells.block, strict=True) if owner == b) for b in blocks}
    nats = sum(by_block.values()) + terms["reconstruction"] + terms["prior"]
    scores = {"nats_per_token": nats, "bits_per_character": bits(nats, per_token), **by_block, **terms}
    if isinstance(objective, TokenDiffusion):
        scores["bits_per_character_sigma_max"] = bits(terms["cross_entropy_sigma_max"], per_token)
    return {
        "kind": "likelihood",
        "title": "bound",
        "scores": scores,
        "nats_by_level": {"edges": cells.edges, "nats": cells.nats},
        "protocol": {
            "metric": "variational bound: sum over disjoint intervals, stratified, antithetic over rows"
            if isinstance(objective, MaskedDiffusion)
            else "variational bound: sum over disjoint intervals, stratified in ln sigma, independent over tokens",
            "draws": draws,
            "intervals": "disjoint",
            **protocol,
        },
    }


def bits(nats: float, characters_per_token: float) -> float:
    """Returns bits per character from nats per token."""
    return nats / math.log(2) / characters_per_token


# ---------------------------------------------------------------------------------------------------------------------
# What embeddings alone give away


def token_shares(rows: Rows, vocabulary: int) -> np.ndarray:
    """Returns how often each token occurs in a split, (V,) float64, sums to 1."""
    return np.bincount(rows.split.tokens, minlength=vocabulary) / len(rows.split.tokens)


def given_away(table: Tensor, shares: np.ndarray, levels: Sequence[float], seed: int) -> list[float]:
    """Returns the nats of a token that its noisy embedding gives away at each level, without any network or context.

    The mutual information of token and z = e + s * eps when tokens are drawn by their shares: the posterior over rows of equal
    norm is the softmax of ln share + <z, e> / s^2.

    Args:
        table: (V, D), rows of norm 1.
    """
    random = generator(seed, "given_away")
    table, log_shares = table.double().cpu(), torch.from_numpy(shares).clamp_min(1e-300).log()
    tokens = torch.multinomial(torch.from_numpy(shares), GIVEN_AWAY_DRAWS, replacement=True, generator=random)
    noise = torch.randn((GIVEN_AWAY_DRAWS, table.shape[1]), dtype=torch.float64, generator=random)
    found = []
    for level in levels:
        posterior = (log_shares + (table[tokens] + level * noise) @ table.T / level**2).log_softmax(-1)  # (n, V)
        gained = posterior.gather(1, tokens[:, None])[:, 0] - log_shares[tokens]
        found.append(float(gained.mean()))
    return found


def embedding_result(model: LanguageModel, rows: Rows, seed: int) -> dict[str, Any]:
    """Returns what the noisy embedding alone gives away at the blocks' edges, and how alike the target embeddings are."""
    objective = model.objective
    with torch.no_grad():
        table = objective.table(model.modules, model.device)
    nats = given_away(table, token_shares(rows, objective.vocabulary), objective.partition.edges, seed)
    gram = (table @ table.T).double()
    off = (gram.sum() - gram.trace()) / (len(table) * (len(table) - 1))
    scores = {f"nats_block_{b}": below - above for b, (above, below) in enumerate(zip(nats[:-1], nats[1:], strict=True))}
    return {
        "kind": "embeddings",
        "title": "embeddings",
        "scores": {**scores, "mean_cosine": float(off)},
        "protocol": {"metric": "nats of a token that its noisy embedding gives away", "draws": GIVEN_AWAY_DRAWS, "seed": seed},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Generated text


def word_scores(texts: Sequence[str], known: set[str] | None) -> dict[str, float]:
    """Returns what can be counted in texts.

    Args:
        known: words of the training text; None where it is too large to list.

    Returns:
        known_words: the share of words that occur in it. distinct_n: different n-grams of words over all. repetition: the mean
        share of a text's 4-grams that it had before. entropy: of a text's words, nats, on average; a text of n words has ln n at
        most. None where no text is long enough.
    """
    words = [text.split() for text in texts]
    total = sum(map(len, words))
    scores: dict[str, float | None] = {"words": total}
    scores["known_words"] = None if known is None or not total else sum(word in known for text in words for word in text) / total
    for n in DISTINCT:
        grams = [gram for text in words for gram in zip(*(text[i:] for i in range(n)), strict=False)]
        scores[f"distinct_{n}"] = len(set(grams)) / len(grams) if grams else None
    repeated, entropies = [], []
    for text in words:
        grams = list(zip(*(text[i:] for i in range(REPEATED)), strict=False))
        if grams:
            repeated.append(1 - len(set(grams)) / len(grams))
        if text:
            counts = np.array(list(Counter(text).values())) / len(text)
            entropies.append(float(-(counts * np.log(counts)).sum()))
    scores["repetition"] = sum(repeated) / len(repeated) if repeated else None
    scores["entropy"] = sum(entropies) / len(entropies) if entropies else None
    return scores


def excerpts(rows: Rows, length: int, count: int, seed: int) -> Tensor:
    """Returns pieces of a split to begin from or to compare with, (count, length) int64: they repeat where there are too few.

    Of a stream, the beginnings of rows; of packed documents, those of documents that are long enough. In an order by seed.

    Raises:
        SettingError: no document is that long.
    """
    starts = rows.start
    if rows.packing == "documents":
        begin = np.concatenate([[0], rows.split.ends[:-1]])
        starts = begin[rows.split.ends - begin >= length]
    require(
        len(starts) > 0 and length <= rows.context,
        f"sampler.prompt + sampler.length = {length}: no held-out document is that long",
    )
    chosen = starts[step_indices(seed, 0, 0, count, len(starts))]
    return torch.from_numpy(rows.split.tokens[chosen[:, None] + np.arange(length)].astype(np.int64))


def at_matched_entropy(entropies: Sequence[float], values: Sequence[float], entropy: float) -> float | None:
    """Returns a score that was measured at several entropies, at one between them (linear); None outside their range.

    For two models whose samples differ in entropy: one's temperature is swept, and its score read off where the other stands.
    """
    order = np.argsort(entropies)
    x, y = np.array(entropies)[order], np.array(values)[order]
    return float(np.interp(entropy, x, y)) if x[0] <= entropy <= x[-1] else None


def load_causal(setting: str, name: str) -> tuple[Any, Any]:
    """Returns tokenizer and causal model of `transformers`.

    Raises:
        SettingError: no such model, library or network.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise SettingError(f"{setting}={name} needs transformers: pip install '.[text]'") from None
    check_hub(setting, name)
    try:
        return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()
    except Exception as error:  # the library's errors share no base class
        raise SettingError(f"{setting}={name} cannot be read as a causal model ({reason(error)})") from None


@torch.no_grad()
def text_features(texts: Sequence[str], name: str, device: torch.device) -> np.ndarray:
    """Returns MAUVE's features: a causal model's last hidden state at each text's last token, (n, D) float32."""
    tokenizer, model = load_causal("eval.features", name)
    model = model.to(device)
    found = []
    for text in texts:
        tokens = tokenizer(text or " ", return_tensors="pt", truncation=True).input_ids.to(device)  # (1, T)
        require(tokens.shape[1] > 0, f"eval.features={name}: its tokenizer has no token for a generated text, {text!r}")
        found.append(model(tokens, output_hidden_states=True).hidden_states[-1][0, -1].float().cpu())
    return torch.stack(found).numpy()


@torch.no_grad()
def generative_perplexity(texts: Sequence[str], name: str, device: torch.device) -> float:
    """Returns exp of the mean negative log-likelihood per token that a causal model gives to texts; text by text, no padding."""
    tokenizer, model = load_causal("eval.perplexity", name)
    model = model.to(device)
    total, count = 0.0, 0
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt", truncation=True).input_ids.to(device)  # (1, T)
        if tokens.shape[1] > 1:
            logits = model(tokens).logits[0, :-1].double()  # (T - 1, V)
            total += F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
            count += tokens.shape[1] - 1
    require(count > 0, "eval.perplexity: the generated texts are too short to score")
    return math.exp(total / count)


def mauve_scores(
    generated: np.ndarray, reference: np.ndarray, *, scaling: float, buckets: int | None, seeds: int
) -> dict[str, float]:
    """Returns MAUVE of features (n, D) and (m, D): mean and deviation over seeds of its clustering (Pillutla et al., 2102.01454).

    Args:
        scaling: c of exp(-c KL); 5 by default in the library, .2 in the DiffusionBlocks paper, which is lenient.
        buckets: clusters; None: a tenth of the smaller set, as in the library.
    """
    try:
        import mauve
    except ImportError as error:
        raise SettingError(f"eval.features needs {error.name}: pip install '.[text]', or set eval.features=null") from None
    values = [
        mauve.compute_mauve(
            p_features=reference,
            q_features=generated,
            mauve_scaling_factor=scaling,
            num_buckets="auto" if buckets is None else buckets,
            seed=seed,
            verbose=False,
        ).mauve
        for seed in range(seeds)
    ]
    return {"mauve": float(np.mean(values)), "mauve_spread": float(np.std(values, ddof=1)) if seeds > 1 else 0.0}


def given_features(path: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns features that are given in an .npz: of `count` generated texts, (count, D), and of references, (m, D).

    Raises:
        SettingError: no such file, another content, or features of another number of texts.
    """
    try:
        with np.load(path) as given:
            generated, reference = given["generated"], given["reference"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise SettingError(
            f"eval.features={path} is not an .npz with `generated` and `reference` ({reason(error)}): give another, or a model"
        ) from None
    shapes = generated.shape, reference.shape
    require(
        generated.ndim == reference.ndim == 2 and generated.shape[1] == reference.shape[1] and len(reference) > 0,
        f"eval.features={path} must have `generated` (n, D) and `reference` (m, D), not {shapes[0]} and {shapes[1]}",
    )
    require(
        len(generated) == count,
        f"eval.features={path} has features of {len(generated)} generated texts, there are {count} by sampler.num_samples",
    )
    return generated, reference


def mauve_result(
    texts: Sequence[str], references: Sequence[str], features: str, device: torch.device, **settings: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns MAUVE and its protocol, with features from a model of `transformers`, or given in an .npz.

    Args:
        features: a model by path or name, or an .npz with `generated` and `reference`, (n, D) and (m, D), of these texts.
    """
    if features.endswith(".npz"):
        generated, reference = given_features(features, len(texts))
    else:
        generated, reference = (text_features(list(both), features, device) for both in (texts, references))
    protocol = {
        "mauve_features": features,
        "mauve_pooling": "last hidden state at the last token",
        "mauve_scored": "prompt and continuation",
        "mauve_scaling": settings["scaling"],
        "mauve_buckets": settings["buckets"] or max(2, round(min(len(generated), len(reference)) / 10)),
        "mauve_seeds": list(range(settings["seeds"])),
        "mauve_references": len(reference),
        "mauve_text": importlib.metadata.version("mauve-text"),
    }
    return mauve_scores(generated, reference, **settings), protocol


def check_scores(features: str | None, perplexity: Sequence[str], count: int) -> None:
    """Refuses models and features that are not there, before any work; `count` texts are to be drawn.

    Raises:
        SettingError: what is missing.
    """
    if features is not None:
        try:
            importlib.metadata.version("mauve-text")
        except importlib.metadata.PackageNotFoundError:
            raise SettingError("eval.features needs mauve-text: pip install '.[text]', or set eval.features=null") from None
        if features.endswith(".npz"):
            given_features(features, count)
        else:
            load_causal("eval.features", features)
    for name in perplexity:
        load_causal("eval.perplexity", name)
