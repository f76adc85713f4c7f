"""Language models as blocks: networks over tokens, and what each way of training noises, predicts and scores.

    next_token       the plain model: cross-entropy of each token given those before it
    token_diffusion  each token's embedding is denoised given the tokens before it; a block owns an interval of sigma
    masked           hidden tokens are predicted from those that are seen, MD4; a block owns an interval of the masked share

All predict every token of a row, the first one too. Logits are over the vocabulary; one more embedding, the last row, stands for
what is not a token of the text: the place before the first one, or a mask.

DiffusionBlocks: arXiv 2506.14202, appendix E. MD4: Shi et al., arXiv 2406.04329. Huginn: Geiping et al., arXiv 2502.05171.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from dblock_modules import LevelDistribution, Partition, precondition, sample_interval, widen_linear, widen_log
from model import Autocast, Batch, Draw, LearnedTable, cross_entropy_weight, fixed_table, part_name
from randomness import generator
from vit import AdaLN, Layers, LevelEmbedding, TokenAttention, TokenLayer, Visibility, modulate

LEVEL_SCALE = 1000.0  # of the masked share, in [0, 1], where it enters a level embedding, as MD4 and DiT scale their time

# ---------------------------------------------------------------------------------------------------------------------
# Networks


class TokenHead(nn.Module):
    """A norm, scaled by the level where there is one, and logits from the token embedding (tied) or a matrix of its own.

    Args:
        vocabulary: tokens that can be predicted, the first rows of the embedding.
    """

    def __init__(self, width: int, vocabulary: int, condition_width: int, tied: bool) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.norm = nn.RMSNorm(width, eps=1e-6, elementwise_affine=condition_width == 0)
        self.adaLN = AdaLN(condition_width, 2 * width) if condition_width else None
        self.linear = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, c: Tensor | None, embedding: Tensor) -> Tensor:
        x = self.norm(x)  # (N, T, D)
        if self.adaLN is not None:
            x = modulate(x, *self.adaLN(c).chunk(2, dim=-1))  # (N, T, D)
        weight = embedding[: self.vocabulary] if self.linear is None else self.linear.weight  # (V, D)
        return F.linear(x, weight)  # (N, T, V)


class TokenEmbedding(nn.Embedding):
    """Token embeddings with entries of about 1 where they come in, so that noise of that size does not drown them.

    The weight itself has rows of norm 1, as a tied head wants it.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__(vocabulary + 1, width)
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5  # (N, T, D)


class Transformer(nn.Module):
    """Some layers of a language model with ends of their own: logits of tokens from tokens, noisy embeddings, or both.

    Given both, the `concat` layout puts noisy embeddings before the tokens, `inline` mixes them place by place.

    Args:
        layout: `concat`, `inline`, or None for a network that takes no noisy embeddings.
        condition_width: 0 for a network without a level.
    """

    def __init__(
        self, *, vocabulary: int, depth: int, width: int, heads: int, condition_width: int, tied: bool, layout: str | None
    ) -> None:
        super().__init__()
        self.layout, self.heads = layout, heads
        self.tokens = TokenEmbedding(vocabulary, width)
        self.noisy = nn.Linear(width, width, bias=False) if layout else None
        self.adapter = nn.Linear(2 * width, width, bias=False) if layout == "inline" else None
        self.level = LevelEmbedding(condition_width) if condition_width else None
        self.layers = Layers(TokenLayer(width, heads, condition_width) for _ in range(depth))
        self.head = TokenHead(width, vocabulary, condition_width, tied)
        initialize(self)

    def forward(
        self, attend: TokenAttention, tokens: Tensor | None = None, z_in: Tensor | None = None, c_noise: Tensor | None = None
    ) -> Tensor:
        """Returns logits (N, T, V), for the noisy places alone where they stand beside tokens.

        Args:
            attend: positions and mask of what is given.
            tokens: (N, T) int64.
            z_in: noisy embeddings (N, T, D), scaled.
            c_noise: (N, T) or (N, 1), or (N, 2 T) for noisy embeddings beside tokens; None for a network without a level.
        """
        x = None if tokens is None else self.tokens(tokens)  # (N, T, D)
        places = None
        if z_in is not None:
            noisy = self.noisy(z_in)  # (N, T, D)
            if self.layout == "inline":
                x = self.adapter(torch.cat([noisy, x], dim=-1))  # (N, T, D)
            else:
                places = noisy.shape[1]
                x = noisy if x is None else torch.cat([noisy, x], dim=1)  # (N, T or 2T, D)
        c = None if self.level is None else self.level(c_noise)  # (N, T or 1 or 2T, C)
        x = self.layers(x, c, attend)  # (N, T or 2T, D)
        if places is not None and c is not None:
            c = c[:, :places]  # (N, T, C)
        return self.head(x[:, :places], c, self.tokens.weight)  # (N, T, V)


class Recurrent(nn.Module):
    """A transformer whose core repeats: prelude, then adapter and core on (state, prelude's output) again and again, then coda.

    As diffusion the state is the noisy embedding, and the core runs once.

    Args:
        condition_width: 0 for a network without a level; the prelude never has one.
        noisy: whether the state is a noisy embedding.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        prelude: int,
        core: int,
        coda: int,
        width: int,
        heads: int,
        condition_width: int,
        tied: bool,
        noisy: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = TokenEmbedding(vocabulary, width)
        self.noisy = nn.Linear(width, width, bias=False) if noisy else None
        self.level = LevelEmbedding(condition_width) if condition_width else None
        self.prelude = Layers(TokenLayer(width, heads, 0, sandwich=True) for _ in range(prelude))
        self.adapter = nn.Linear(2 * width, width, bias=False)
        self.core = Layers(TokenLayer(width, heads, condition_width, sandwich=True) for _ in range(core))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.coda = Layers(TokenLayer(width, heads, condition_width, sandwich=True) for _ in range(coda))
        self.head = TokenHead(width, vocabulary, condition_width, tied)
        initialize(self)

    def repeat(self, state: Tensor, given: Tensor, c: Tensor | None, attend: TokenAttention) -> Tensor:
        """One pass through adapter and core: (N, T, D) of state and prelude's output to the next state."""
        state = self.adapter(torch.cat([state, given], dim=-1))  # (N, T, D)
        return self.core(state, c, attend)  # (N, T, D)

    def forward(
        self,
        attend: TokenAttention,
        tokens: Tensor,
        z_in: Tensor | None = None,
        c_noise: Tensor | None = None,
        *,
        state: Tensor | None = None,
        without_gradient: int = 0,
        with_gradient: int = 1,
    ) -> Tensor:
        """Returns logits (N, T, V).

        Args:
            tokens: (N, T) int64.
            z_in: noisy embeddings (N, T, D), scaled, from which the state starts where it is one.
            c_noise: (N, T) or (N, 1).
            state: (N, T, D) the random state to start from, else.
            without_gradient: repetitions through which no gradient goes.
            with_gradient: repetitions after those.
        """
        given = self.tokens(tokens)  # (N, T, D)
        given = self.prelude(given, None, attend)  # (N, T, D)
        c = None if self.level is None else self.level(c_noise)  # (N, T or 1, C)
        state = state if self.noisy is None else self.noisy(z_in)  # (N, T, D)
        with torch.no_grad():
            for _ in range(without_gradient):
                state = self.repeat(state, given, c, attend)  # (N, T, D)
        for _ in range(with_gradient):
            state = self.repeat(state, given, c, attend)  # (N, T, D)
        x = self.coda(self.norm(state), c, attend)  # (N, T, D)
        return self.head(x, c, self.tokens.weight)  # (N, T, V)


def initialize(model: nn.Module) -> None:
    """Initialises a language model: matrices by their width, and what a level moves at zero, so that it moves nothing yet.

    A gate at zero makes its layer the identity, as in a DiT.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, AdaLN):
            nn.init.zeros_(module.linear.weight)


# ---------------------------------------------------------------------------------------------------------------------
# What they are trained for


def tokens_before(tokens: Tensor, documents: Tensor, start: int) -> Tensor:
    """Returns the token before each, (N, T); the token `start` stands before the first one of a document."""
    before = F.pad(tokens[:, :-1], (1, 0), value=start)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return before.masked_fill(first, start)


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the cross-entropy of every token in nats, (N, T) float32."""
    return F.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none")


@dataclass(frozen=True)
class TokenObjective:
    """What all objectives over tokens have.

    Attributes:
        vocabulary: tokens; the index after the last stands for what is none.
        packed: whether rows hold documents that must not see each other.
        seed: of all draws.
    """

    distribution: LevelDistribution
    partition: Partition
    overlap: float
    vocabulary: int
    packed: bool
    seed: int

    def attend(self, network: nn.Module, rule: str, documents: Tensor) -> TokenAttention:
        """Returns positions and mask of a whole text, (N, T), under a rule of Visibility."""
        length, device = documents.shape[1], documents.device
        visible = Visibility(rule, length, documents if self.packed else None)
        positions = torch.arange(visible.size, device=device) % length
        return TokenAttention(positions, network_head_dim(network), visible.mask(device))


def network_head_dim(network: nn.Module) -> int:
    """Returns the width of a head of a language model."""
    return network.tokens.embedding_dim // network.heads


@dataclass(frozen=True)
class NextToken(TokenObjective):
    """The plain language model.

    Attributes:
        recurrence: mean repetitions of a recurrent model's core, 0 for a plain transformer.
        backpropagated: how many of the last ones have gradients.
    """

    recurrence: float
    backpropagated: int

    def repetitions(self, draw: Draw) -> tuple[int, int]:
        """Returns how often a step repeats the core, without and with gradients.

        1 + Poisson(rate), ln rate ~ N(ln mean - 1/8, 1/4) (Huginn section 3.3). One number for the whole batch.
        """
        random = generator(self.seed, "recurrence", draw.block, draw.step)
        spread = 0.5
        normal = torch.randn((), dtype=torch.float64, generator=random)
        rate = torch.exp(math.log(self.recurrence) - spread**2 / 2 + spread * normal)
        count = 1 + int(torch.poisson(rate, generator=random))
        return max(count - self.backpropagated, 0), min(count, self.backpropagated)

    def start_state(self, shape: tuple[int, ...], purpose: str, *keys: int, device: torch.device) -> Tensor:
        """Returns random states to start from: normal of deviation sqrt(2/5), cut at 3 deviations (Huginn section 3.2)."""
        state = torch.empty(shape, device=device)
        random = generator(self.seed, purpose, *keys, device=device)
        return nn.init.trunc_normal_(state, std=0.4**0.5, a=-3 * 0.4**0.5, b=3 * 0.4**0.5, generator=random)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per row of (tokens, documents, weights), each (n, T); see Objective."""
        tokens, documents, weights = batch
        network = modules[part_name(draw.block)]
        repeats = {}
        if self.recurrence:
            shape = (draw.batch_size, tokens.shape[1], network.tokens.embedding_dim)
            state = self.start_state(shape, "state", draw.block, draw.step, device=tokens.device)[draw.rows]
            without, with_gradient = self.repetitions(draw)
            repeats = {"state": state, "without_gradient": without, "with_gradient": with_gradient}
        return (self.losses(network, tokens, documents, autocast, **repeats) * weights).sum(1)  # (n,)

    def losses(
        self, network: nn.Module, tokens: Tensor, documents: Tensor, autocast: Autocast = None, **repeats: Tensor | int
    ) -> Tensor:
        """Returns the cross-entropy of every token, (n, T) float32, in nats."""
        with autocast or nullcontext():
            attend = self.attend(network, "causal", documents)
            logits = network(attend, tokens_before(tokens, documents, self.vocabulary), **repeats)
        return token_losses(logits, tokens)


@dataclass(frozen=True)
class TokenDiffusion(TokenObjective):
    """Denoising of each token's embedding, given the tokens before it; the prediction is a distribution over tokens.

    Attributes:
        sigma_data: of EDM's preconditioning, which scales the network's input alone: its output is a distribution.
        layout: `concat` or `inline`.
        weighting: see model.cross_entropy_weight.
        fixed: target embeddings (V, D) of norm 1; None where they are learned. Learned ones are normalised when they are looked
            up, in training and in sampling alike, so that they cannot grow away from the noise.
    """

    sigma_data: float
    layout: str
    weighting: str
    fixed: Tensor | None

    def table(self, modules: Mapping[str, nn.Module], device: torch.device) -> Tensor:
        """Returns the target embeddings, (V, D)."""
        return modules["shared"]() if self.fixed is None else self.fixed.to(device)

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of the levels that a block is trained on, overlap included."""
        return widen_log(*self.partition.interval(block), self.overlap, self.distribution.minimum, self.distribution.maximum)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per row of (tokens, documents, weights), each (n, T), with a level for every token; see Objective."""
        tokens, documents, weights = batch
        device = tokens.device
        table = self.table(modules, device)
        key, shape = (draw.block, draw.step), (draw.batch_size, tokens.shape[1])
        uniform = torch.rand(
            shape, dtype=torch.float64, device=device, generator=generator(self.seed, "sigma", *key, device=device)
        )
        noise = torch.randn((*shape, table.shape[1]), device=device, generator=generator(self.seed, "noise", *key, device=device))
        sigma = sample_interval(self.distribution, *self.interval(draw.block), uniform)
        weights = weights * cross_entropy_weight(self.weighting, sigma, self.sigma_data)[draw.rows]
        z = table[tokens] + sigma[draw.rows, :, None].float() * noise[draw.rows]  # (n, T, D)
        network = modules[part_name(draw.block)]
        return (token_losses(self.logits(network, z, sigma[draw.rows], tokens, documents, autocast), tokens) * weights).sum(1)

    def inputs(self, z: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what a network takes in for noisy embeddings (n, T, D) of levels (n, T): c_in z and c_noise, float32."""
        c = precondition(sigma.double(), self.sigma_data)
        return c.c_in[..., None].float() * z, c.c_noise.float()

    def clean_level(self, block: int) -> float:
        """Returns the level under which a block meets what is decided, so that a cache of it is exact.

        Clean tokens beside the noisy ones have the lowest level there is; inline, a decided token's own noisy embedding stays,
        at the lowest level of the block.
        """
        return self.distribution.minimum if self.layout == "concat" else self.partition.interval(block)[0]

    def logits(
        self, network: nn.Module, z: Tensor, sigma: Tensor, tokens: Tensor, documents: Tensor, autocast: Autocast = None
    ) -> Tensor:
        """Returns the logits of every token given its own noisy embedding and the tokens before it, (n, T, V).

        Args:
            z: (n, T, D).
            sigma: (n, T) float64.
            tokens: (n, T) the clean text.
        """
        z_in, c_noise = self.inputs(z, sigma)
        if self.layout == "inline":
            given, rule = tokens_before(tokens, documents, self.vocabulary), "causal"
        else:
            given, rule = tokens, "concat"
            lowest = torch.full_like(c_noise, math.log(self.distribution.minimum) / 4)
            c_noise = torch.cat([c_noise, lowest], dim=1)  # (n, 2T)
        with autocast or nullcontext():
            return network(self.attend(network, rule, documents), given, z_in, c_noise)


@dataclass(frozen=True)
class MaskedDiffusion(TokenObjective):
    """MD4 with the linear schedule: a token is kept with probability alpha(t), and what is hidden is predicted from the rest.

    Attributes:
        epsilon: alpha runs from 1 - epsilon at t = 0 to epsilon at t = 1.
    """

    epsilon: float

    def interval(self, block: int) -> tuple[float, float]:
        """Returns (low, high) of the masked shares that a block is trained on, overlap included."""
        bounds = self.distribution.minimum, self.distribution.maximum
        return widen_linear(*self.partition.interval(block), self.overlap, *bounds)

    def alpha(self, t: Tensor) -> Tensor:
        """Returns the share of tokens that are kept at masked share t."""
        return (1 - 2 * self.epsilon) * (1 - t) + self.epsilon

    def weight(self, t: Tensor) -> Tensor:
        """Returns -alpha'(t) / (1 - alpha(t)), which makes the cross-entropy of hidden tokens a bound on the likelihood."""
        return (1 - 2 * self.epsilon) / (1 - self.alpha(t))

    def antithetic(self, count: int, low: float, high: float, offset: Tensor) -> Tensor:
        """Returns masked shares for `count` rows, (count,) float64: one uniform offset, then equal steps, around the interval."""
        steps = torch.arange(count, dtype=torch.float64, device=offset.device) / count
        return low + (high - low) * ((offset + steps) % 1)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per row of (tokens, documents, weights), each (n, T); see Objective."""
        tokens, documents, weights = batch
        key, device = (draw.block, draw.step), tokens.device
        offset = torch.rand((), dtype=torch.float64, device=device, generator=generator(self.seed, "sigma", *key, device=device))
        t = self.antithetic(draw.batch_size, *self.interval(draw.block), offset)[draw.rows]
        shape = (draw.batch_size, tokens.shape[1])
        uniform = torch.rand(
            shape, dtype=torch.float64, device=device, generator=generator(self.seed, "noise", *key, device=device)
        )
        losses = self.losses(modules[part_name(draw.block)], tokens, documents, t, uniform[draw.rows], autocast)
        return (losses * weights).sum(1)

    def losses(
        self, network: nn.Module, tokens: Tensor, documents: Tensor, t: Tensor, uniform: Tensor, autocast: Autocast = None
    ) -> Tensor:
        """Returns each token's share of the bound's integrand at masked shares t, (n, T) float32, in nats per unit of t.

        Args:
            t: (n,) float64.
            uniform: (n, T) float64 in [0, 1): a token is hidden where it exceeds alpha(t).
        """
        hidden = uniform >= self.alpha(t)[:, None]
        logits = self.logits(network, tokens.masked_fill(hidden, self.vocabulary), documents, t, autocast)
        return token_losses(logits, tokens) * (hidden * self.weight(t)[:, None]).float()

    def logits(self, network: nn.Module, seen: Tensor, documents: Tensor, t: Tensor, autocast: Autocast = None) -> Tensor:
        """Returns logits (n, T, V) of every token, for a text whose hidden tokens are the index after the last.

        Args:
            seen: (n, T) int64.
            t: (n,) float64.
        """
        with autocast or nullcontext():
            attend = self.attend(network, "all", documents)
            return network(attend, seen, c_noise=(LEVEL_SCALE * t[:, None]).float())


# ---------------------------------------------------------------------------------------------------------------------
# From a configuration


def build_network(config: Config, vocabulary: int, depth: int) -> nn.Module:
    """Returns a block's network, with `depth` layers of a transformer, or a whole recurrent model."""
    model, objective = config.model, config.objective
    diffusion = objective.name == "token_diffusion"
    shared = {
        "vocabulary": vocabulary,
        "width": model.width,
        "heads": model.heads,
        "condition_width": 0 if objective.name == "next_token" else model.condition_width,
        "tied": model.tied,
    }
    if model.name == "recurrent":
        network = Recurrent(**shared, prelude=model.prelude, core=model.core, coda=model.coda, noisy=diffusion)
    else:
        network = Transformer(**shared, depth=depth, layout=objective.layout if diffusion else None)
    if diffusion:
        start_at_table(network, fixed_table(vocabulary, model.width, config.seed, normalize=True))
    return network


@torch.no_grad()
def start_at_table(network: Transformer | Recurrent, table: Tensor) -> None:
    """Lets a network read noisy embeddings from the start: what they tell has not to be learned token by token.

    Token embeddings, and with them a tied head, start at the target embeddings (V, D), and noisy ones come in as they are, beside
    or on top of the clean ones. From there all are trained.
    """
    network.tokens.weight[: len(table)] = table
    nn.init.eye_(network.noisy.weight)
    if network.adapter is not None:
        network.adapter.weight.copy_(0.5**0.5 * torch.eye(table.shape[1]).repeat(1, 2))


def build_table(config: Config, vocabulary: int) -> LearnedTable:
    """Returns the part `shared`: target embeddings that are learned."""
    return LearnedTable(vocabulary, config.model.width, config.seed, normalize=True)


@dataclass
class LanguageModel:
    """The blocks that one job holds, and what is needed to use them.

    Attributes:
        modules: by part name.
    """

    config: Config
    objective: NextToken | TokenDiffusion | MaskedDiffusion
    modules: Mapping[str, nn.Module]
    autocast: Callable[[], AbstractContextManager] = nullcontext

    @property
    def device(self) -> torch.device:
        return next(next(iter(self.modules.values())).parameters()).device

    def network(self, block: int) -> nn.Module:
        """Returns a block's network."""
        return self.modules[part_name(block)]


def build_objective(
    config: Config, distribution: LevelDistribution, partition: Partition, vocabulary: int
) -> NextToken | TokenDiffusion | MaskedDiffusion:
    """Returns the objective that a configuration describes."""
    objective = config.objective
    common = (distribution, partition, config.partition.overlap, vocabulary, config.data.packing == "documents", config.seed)
    if objective.name == "next_token":
        recurrent = config.model.name == "recurrent"
        return NextToken(*common, config.model.recurrence if recurrent else 0, config.model.backpropagated if recurrent else 0)
    if objective.name == "masked":
        return MaskedDiffusion(*common, objective.epsilon)
    fixed = fixed_table(vocabulary, config.model.width, config.seed, normalize=True) if objective.table == "fixed" else None
    return TokenDiffusion(*common, objective.sigma_data, objective.layout, objective.weighting, fixed)
