"""Text from language models: token by token with caches, or whole rows by masked diffusion.

A sample depends on its own stream of random numbers alone, drawn in float64: in float32 the smallest uniform numbers are too
coarse, which lowers the entropy of what is drawn as a lower temperature would (Zheng et al., arXiv 2409.02908).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import TextSamplerConfig
from dblock_modules import make_schedule
from randomness import generator
from text_model import LanguageModel, MaskedDiffusion, NextToken, TokenDiffusion, network_head_dim
from vit import Cache, TokenAttention, Visibility


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Returns the distribution that a choice is made from, (..., V) float64.

    Args:
        top_k: only the likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability, the one that reaches it among them.
    """
    p = (logits.double() / temperature).softmax(-1)
    if top_k:
        least = p.topk(min(top_k, p.shape[-1]), dim=-1).values[..., -1:]
        p = p.where(p >= least, 0.0)
    if top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, order, ordered.where(before < top_p * p.sum(-1, keepdim=True), 0.0))
    return p / p.sum(-1, keepdim=True)


def choose(p: Tensor, uniform: Tensor) -> Tensor:
    """Returns tokens drawn from distributions (..., V) by inverse transform, int64 (...).

    Args:
        uniform: (...) float64 in [0, 1).
    """
    cumulative = p.cumsum(-1)
    return (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1).clamp(max=p.shape[-1] - 1)


def streams(seed: int, purpose: str, first: int, count: int, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
    """Returns what is drawn for samples first, first + 1 ..., stacked: each from a stream of its own."""
    return torch.stack([draw(generator(seed, purpose, index)) for index in range(first, first + count)])


@torch.no_grad()
def generate(model: LanguageModel, prompt: Tensor, settings: TextSamplerConfig, first: int = 0) -> Tensor:
    """Draws text.

    Args:
        prompt: (n, P) int64, P may be 0.
        first: the number of the first sample, which names its random stream.

    Returns:
        (n, P + settings.length) int64, the prompt included.
    """
    draw = {NextToken: next_tokens, TokenDiffusion: denoise_tokens, MaskedDiffusion: unmask}[type(model.objective)]
    return draw(model, prompt.to(model.device), settings, first)


def one_pass(model: LanguageModel, block: int, positions: Tensor, cache: Cache, keep: bool) -> TokenAttention:
    """Returns the attention of a pass over places that see those in the cache and, causally, each other."""
    visible = Visibility("causal", len(positions))
    mask = visible.mask(positions.device) if len(positions) > 1 else None
    return TokenAttention(positions, network_head_dim(model.network(block)), mask, cache, keep)


def next_tokens(model: LanguageModel, prompt: Tensor, settings: TextSamplerConfig, first: int) -> Tensor:
    """Draws each token from the plain model's prediction; arguments as for `generate`."""
    objective, network, device = model.objective, model.network(0), model.device
    n, start = prompt.shape
    total = start + settings.length
    uniform = streams(settings.seed, "choice", first, n, lambda g: torch.rand(settings.length, dtype=torch.float64, generator=g))
    uniform = uniform.to(device)
    repeats = {}
    if objective.recurrence:
        shape = (total, network.tokens.embedding_dim)
        states = [
            objective.start_state(shape, "sample_state", settings.seed, first + i, device=torch.device("cpu")) for i in range(n)
        ]
        states = torch.stack(states).to(device)  # (n, total, D)
        repeats = {"with_gradient": round(objective.recurrence)}
    cache, text, done = Cache(), prompt, 0
    given = F.pad(prompt, (1, 0), value=objective.vocabulary)  # (n, P + 1)
    for i in range(settings.length):
        positions = torch.arange(done, done + given.shape[1], device=device)
        if objective.recurrence:
            repeats["state"] = states[:, positions]
        with model.autocast():
            logits = network(one_pass(model, 0, positions, cache, keep=True), given, **repeats)[:, -1]  # (n, V)
        token = choose(probabilities(logits, settings.temperature, settings.top_k, settings.top_p), uniform[:, i])
        text, given, done = torch.cat([text, token[:, None]], dim=1), token[:, None], done + len(positions)
    return text


def denoise_tokens(model: LanguageModel, prompt: Tensor, settings: TextSamplerConfig, first: int) -> Tensor:
    """Denoises one token's embedding after the other by Euler steps, each by the block that owns its level.

    Every block that the schedule visits has a cache of its own over what is decided, under a fixed level (clean_level), so that
    it is exact. Temperature, top-k and top-p act on the prediction of every step: on the expected embedding in between, and on
    the token that is drawn at the end. Arguments as for `generate`.
    """
    objective, device = model.objective, model.device
    table = objective.table(model.modules, model.device).double()  # (V, D)
    schedule = make_schedule(settings.schedule, settings.steps, objective.distribution, objective.partition, settings.rho)
    owners = [objective.partition.block_of(sigma) for sigma in schedule]
    caches = {block: Cache() for block in owners}
    n, start = prompt.shape
    shape = (start + settings.length, table.shape[1])
    noise = streams(settings.seed, "noise", first, n, lambda g: torch.randn(shape, dtype=torch.float64, generator=g)).to(device)
    uniform = streams(settings.seed, "choice", first, n, lambda g: torch.rand(settings.length, dtype=torch.float64, generator=g))
    uniform = uniform.to(device)
    inline = objective.layout == "inline"

    def decide(tokens: Tensor, before: Tensor, done: int) -> None:
        """Adds tokens (n, k), that stand from place `done` on, to the caches; `before` are the tokens before them."""
        positions = torch.arange(done, done + tokens.shape[1], device=device)
        for block, cache in caches.items():
            level = torch.full((1, 1), objective.clean_level(block), dtype=torch.float64, device=device)
            attend = one_pass(model, block, positions, cache, keep=True)
            z_in, c_noise = objective.inputs((table[tokens] + level[..., None] * noise[:, positions]).float(), level)
            with model.autocast():
                model.network(block)(attend, before if inline else tokens, z_in if inline else None, c_noise)

    text = F.pad(prompt, (1, 0), value=objective.vocabulary)  # (n, 1 + P), with what stands before the first token
    if start:
        decide(text[:, 1:], text[:, :-1], 0)
    for i in range(start, start + settings.length):
        position = torch.tensor([i], device=device)
        z = schedule[0] * noise[:, position]  # (n, 1, D)
        for sigma, below, block in zip(schedule, [*schedule[1:], 0.0], owners, strict=True):
            level = torch.full((1, 1), sigma, dtype=torch.float64, device=device)
            z_in, c_noise = objective.inputs(z.float(), level)
            attend = one_pass(model, block, position, caches[block], keep=False)
            with model.autocast():
                logits = model.network(block)(attend, text[:, -1:] if inline else None, z_in, c_noise)  # (n, 1, V)
            p = probabilities(logits, settings.temperature, settings.top_k, settings.top_p)
            z = below / sigma * z + (1 - below / sigma) * (p @ table)  # (n, 1, D)
        token = choose(p[:, 0], uniform[:, i - start])[:, None]  # (n, 1)
        if i + 1 < start + settings.length:
            decide(token, text[:, -1:], i)
        text = torch.cat([text, token], dim=1)
    return text[:, 1:]


def cosine_grid(steps: int) -> np.ndarray:
    """Returns the masked shares 1 = t_0 > ... > t_steps = 0 of MD4's sampler, cos(pi/2 (1 - t)) of equal steps."""
    grid = np.cos(math.pi / 2 * (1 - np.linspace(1.0, 0.0, steps + 1)))
    grid[[0, -1]] = 1.0, 0.0
    return grid


def unmask(model: LanguageModel, prompt: Tensor, settings: TextSamplerConfig, first: int) -> Tensor:
    """Draws rows by ancestral sampling of masked diffusion; what is decided never changes. Arguments as for `generate`."""
    objective, device = model.objective, model.device
    n, start = prompt.shape
    total, mask = start + settings.length, objective.vocabulary
    grid = cosine_grid(settings.steps)
    text = F.pad(prompt, (0, settings.length), value=mask)  # (n, T)
    documents = torch.zeros_like(text)
    shape = (settings.steps, 2, total)
    uniform = streams(settings.seed, "choice", first, n, lambda g: torch.rand(shape, dtype=torch.float64, generator=g)).to(device)

    def predict(t: float) -> Tensor:
        levels = torch.full((n,), t, dtype=torch.float64, device=device)
        return objective.logits(model.network(objective.partition.block_of(t)), text, documents, levels, model.autocast())

    for i, (t, s) in enumerate(zip(grid[:-1], grid[1:], strict=True)):
        alpha_t, alpha_s = objective.alpha(torch.tensor([t, s], dtype=torch.float64)).tolist()
        p = probabilities(predict(t), settings.temperature, settings.top_k, settings.top_p)  # (n, T, V)
        opened = (text == mask) & (uniform[:, i, 0] < (alpha_s - alpha_t) / (1 - alpha_t))
        text = torch.where(opened, choose(p, uniform[:, i, 1]), text)
    return torch.where(text == mask, predict(0.0).argmax(-1), text)
