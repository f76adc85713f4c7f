"""Language models: masks, leaks, caches, likelihoods against enumeration, recurrence, data, scores, the command line."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import config as configuration
import text
import text_data
import text_model
import text_sampler
import text_scores
from config import (
    Config,
    MaskedConfig,
    MethodConfig,
    NextTokenConfig,
    PartitionConfig,
    RecurrentConfig,
    SettingError,
    TextConfig,
    TextEvalConfig,
    TextSamplerConfig,
    TokenDiffusionConfig,
    TrainConfig,
    TransformerConfig,
)
from dblock_modules import LogNormalLevels, Partition, UniformLevels, equal_shares, make_partition
from kinds import build_module, build_objective
from model import Draw
from randomness import generator
from text_data import PADDING, Rows, TextData, TokenSource, TokenSplit, cut_rows
from text_model import LanguageModel, MaskedDiffusion, NextToken, TokenDiffusion
from vit import TokenAttention, Visibility, attention

OBJECTIVES = {
    "next_token": NextTokenConfig(),
    "concat": TokenDiffusionConfig(layout="concat"),
    "inline": TokenDiffusionConfig(layout="inline"),
    "masked": MaskedConfig(),
}


def text_config(kind: str, *, recurrent: bool = False, **groups: dict) -> Config:
    """Returns a resolved configuration of a tiny language model on the topics; groups update its fields."""
    one_block = recurrent or kind == "next_token"
    sizes = {"width": 16, "heads": 2, "condition_width": 8}
    config = Config(
        data=TextConfig("topics", context=12, cache="unused"),
        model=RecurrentConfig(prelude=1, core=1, coda=1, recurrence=5, backpropagated=2, **sizes)
        if recurrent
        else TransformerConfig(depth=4, **sizes),
        objective=OBJECTIVES[kind],
        method=MethodConfig("end_to_end" if one_block else "diffusion_blocks"),
        partition=PartitionConfig("equi_probability", num_blocks=2, overlap=0.1),
        train=TrainConfig(steps=3, batch_size=4, precision="fp32", sample_every=0),
        sampler=TextSamplerConfig(steps=4, num_samples=3, length=6),
        eval=TextEvalConfig(draws=2, batch_size=4),
    )
    for name, values in groups.items():
        setattr(config, name, dataclasses.replace(getattr(config, name), **values))
    return configuration.resolve(config)


def random_model(config: Config) -> LanguageModel:
    """Returns a model all of whose parameters are random: at its start a block is the identity and would pass any test."""
    modules = {}
    for block in range(configuration.trained_blocks(config)):
        for name in text.trained_parts(config, block):
            modules[name] = build_module(config, name).eval()
            for index, value in enumerate(modules[name].parameters()):
                value.data.copy_(torch.randn(value.shape, generator=generator(1, name, index)) * 0.3 + (value.ndim == 1))
    return LanguageModel(config, build_objective(config), modules)


KINDS = [("next_token", False), ("concat", False), ("inline", False), ("next_token", True), ("inline", True)]


# ---------------------------------------------------------------------------------------------------------------------
# What sees what


def sees(rule: str, length: int, query: int, key: int) -> bool:
    """The rules, spelled out case by case."""
    if rule == "all":
        return True
    if rule == "causal":
        return key <= query
    if query < length:  # noisy
        return key == query or (key >= length and key - length < query)
    return key >= length and key <= query


@pytest.mark.parametrize("rule", ["all", "causal", "concat"])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_the_enumerated_ones_and_both_kernels_agree(rule: str, packed: bool):
    length = 6
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [3, 3, 3, 3, PADDING, PADDING]]) if packed else None
    visible = Visibility(rule, length, documents)
    dense = visible.dense("cpu")
    for row, query, key in itertools.product(range(len(dense)), range(visible.size), range(visible.size)):
        same = documents is None or documents[row, query % length] == documents[row, key % length]
        assert dense[row, 0, query, key] == (sees(rule, length, query, key) and bool(same))
    assert dense.dtype == torch.bool and dense.any(-1).all()  # no large negative numbers, and every row has a key

    q, k, v = torch.randn(3, 2, 2, visible.size, 8, generator=generator(0, "qkv")).unbind()
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~dense, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k, v, dense), scores)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=visible.blocks("cpu")), scores)


def outputs(model: LanguageModel, tokens: Tensor, documents: Tensor) -> list[Tensor]:
    """Returns each block's logits (n, T, V) for a text under noise that is always the same."""
    objective, found = model.objective, []
    n, length = tokens.shape
    for block in range(objective.partition.num_blocks):
        network = model.network(block)
        if isinstance(objective, NextToken):
            shape = (n, length, network.tokens.embedding_dim)
            state = objective.start_state(shape, "test", device="cpu") if objective.recurrence else None
            repeats = {"state": state, "without_gradient": 2, "with_gradient": 2} if objective.recurrence else {}
            attend = objective.attend(network, "causal", documents)
            found.append(network(attend, text_model.tokens_before(tokens, documents, objective.vocabulary), **repeats))
        else:
            z = torch.randn((n, length, network.tokens.embedding_dim), generator=generator(0, "z"))
            if objective.layout == "inline":
                z = objective.fixed[tokens] + z  # a noisy embedding that tells its token
            sigma = torch.full((n, length), objective.partition.interval(block)[0], dtype=torch.float64)
            found.append(objective.logits(network, z, sigma, tokens, documents))
    return found


def leaks(config: Config, documents: Tensor) -> list[str]:
    """Returns every way in which a changed token reaches an output that must not see it, or fails to reach one that must."""
    model, (n, length) = random_model(config), documents.shape
    tokens = torch.randint(27, (n, length), generator=generator(0, "tokens"))
    inline = getattr(model.objective, "layout", None) == "inline"
    before, found = outputs(model, tokens, documents), []
    for j in range(length):
        changed = tokens.clone()
        changed[:, j] = (changed[:, j] + 1) % 27
        for block, (old, new) in enumerate(zip(before, outputs(model, changed, documents), strict=True)):
            for row, i in itertools.product(range(n), range(length)):
                equal = torch.equal(old[row, i], new[row, i])
                if documents[row, i] != documents[row, j] or i < j or (i == j and not inline):
                    if not equal:
                        found.append(f"block {block}: output {i} sees token {j}")
                elif i > j and equal:
                    found.append(f"block {block}: output {i} does not see token {j}")
    return found


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_no_output_sees_a_later_token_or_another_document(kind: str, recurrent: bool, packing: str):
    config = text_config(kind, recurrent=recurrent, data={"packing": packing})
    documents = torch.zeros((1, 7), dtype=torch.int64)
    if packing == "documents":
        documents = torch.tensor([[4, 4, 4, 5, 5, 5, PADDING]])
    assert leaks(config, documents) == []


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_a_planted_leak_is_found(kind: str, recurrent: bool, monkeypatch: pytest.MonkeyPatch):
    original = Visibility.allowed

    def leaking(self: Visibility, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        clean = key >= self.length if self.rule == "concat" else torch.ones_like(key, dtype=torch.bool)
        return original(self, row, head, query, key) | (clean & (key % self.length == query % self.length + 1))

    monkeypatch.setattr(Visibility, "allowed", leaking)
    assert any(
        "sees token" in leak for leak in leaks(text_config(kind, recurrent=recurrent), torch.zeros((1, 7), dtype=torch.int64))
    )


def test_a_noisy_output_does_not_see_its_own_clean_token():
    config = text_config("concat")
    model, documents = random_model(config), torch.zeros((1, 5), dtype=torch.int64)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = torch.tensor([[1, 2, 9, 4, 5]])
    for old, new in zip(outputs(model, tokens, documents), outputs(model, changed, documents), strict=True):
        assert torch.equal(old[:, :3], new[:, :3]) and not torch.equal(old[:, 3:], new[:, 3:])


def test_positions_are_relative_and_the_same_for_both_halves():
    attend = TokenAttention(torch.arange(4), 8)
    shifted = TokenAttention(torch.arange(4) + 100, 8)
    q, k = torch.randn(2, 1, 1, 4, 8, generator=generator(0, "qk")).unbind()
    scores = [a.rotate(q) @ a.rotate(k).transpose(-1, -2) for a in (attend, shifted)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    model = random_model(text_config("concat"))
    both = model.objective.attend(model.network(0), "concat", torch.zeros((1, 4), dtype=torch.int64))
    assert torch.equal(both.cos[:4], both.cos[4:])


# ---------------------------------------------------------------------------------------------------------------------
# Generation: caches against the forward pass of training


def uncached(model: LanguageModel, prompt: Tensor, settings: TextSamplerConfig) -> Tensor:
    """Generates token by token with the whole forward pass of training every time, and no cache."""
    objective = model.objective
    n, start = prompt.shape
    total = start + settings.length
    draw = text_sampler.streams
    uniform = draw(settings.seed, "choice", 0, n, lambda g: torch.rand(settings.length, dtype=torch.float64, generator=g))
    tokens = prompt
    filters = (settings.temperature, settings.top_k, settings.top_p)
    if isinstance(objective, NextToken):
        width = model.network(0).tokens.embedding_dim
        states = [objective.start_state((total, width), "sample_state", settings.seed, i, device="cpu") for i in range(n)]
    else:
        table = objective.table(model.modules, model.device).double()
        shape = (total, table.shape[1])
        noise = draw(settings.seed, "noise", 0, n, lambda g: torch.randn(shape, dtype=torch.float64, generator=g))
        schedule = text_sampler.make_schedule(settings.schedule, settings.steps, objective.distribution, objective.partition)
    for i in range(start, total):
        whole = F.pad(tokens, (0, 1))  # the token at place i is not decided yet: any will do
        documents = torch.zeros_like(whole)
        if isinstance(objective, NextToken):
            repeats = {"state": torch.stack(states)[:, : i + 1], "with_gradient": 5} if objective.recurrence else {}
            before = text_model.tokens_before(whole, documents, objective.vocabulary)
            logits = model.network(0)(objective.attend(model.network(0), "causal", documents), before, **repeats)[:, i]
            p = text_sampler.probabilities(logits, *filters)
        else:
            z = schedule[0] * noise[:, i]
            for sigma, below in zip(schedule, [*schedule[1:], 0.0], strict=True):
                block = objective.partition.block_of(sigma)
                levels = torch.full((n, i + 1), objective.clean_level(block), dtype=torch.float64)
                levels[:, i] = sigma
                noisy = table[whole] + levels[..., None] * noise[:, : i + 1]
                noisy[:, i] = z
                logits = objective.logits(model.network(block), noisy.float(), levels, whole, documents)[:, i]
                p = text_sampler.probabilities(logits, *filters)
                z = below / sigma * z + (1 - below / sigma) * (p @ table)
        tokens = torch.cat([tokens, text_sampler.choose(p, uniform[:, i - start])[:, None]], dim=1)
    return tokens


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
@pytest.mark.parametrize("length", [0, 3])
def test_cached_and_uncached_generation_give_the_same_tokens(kind: str, recurrent: bool, length: int):
    model = random_model(text_config(kind, recurrent=recurrent))
    prompt = torch.randint(27, (3, length), generator=generator(0, "prompt"))
    settings = TextSamplerConfig(steps=5, length=6, temperature=0.8, top_k=20, top_p=0.95)
    with torch.no_grad():
        expected = uncached(model, prompt, settings)
    drawn = text_sampler.generate(model, prompt, settings)
    assert torch.equal(drawn, expected)
    assert torch.equal(drawn[:, :length], prompt)


@pytest.mark.parametrize(("kind", "recurrent"), [*KINDS, ("masked", False)])
def test_a_sample_depends_on_its_own_seed_only(kind: str, recurrent: bool):
    model, none = random_model(text_config(kind, recurrent=recurrent)), torch.zeros((4, 0), dtype=torch.int64)
    settings = TextSamplerConfig(steps=4, length=5)
    together = text_sampler.generate(model, none, settings)
    assert torch.equal(text_sampler.generate(model, none[:1], settings, first=2), together[2:3])


def test_a_block_that_is_not_visited_is_not_called_and_every_level_goes_to_its_owner():
    model = random_model(text_config("concat", partition={"num_blocks": 4}))
    called = []
    for block in range(4):
        model.network(block).register_forward_hook(lambda *_, block=block: called.append(block))
    none = torch.zeros((1, 0), dtype=torch.int64)
    text_sampler.generate(model, none, TextSamplerConfig(steps=4, length=1))
    assert called == [0, 1, 2, 3]
    called.clear()
    text_sampler.generate(model, none, TextSamplerConfig(steps=1, length=3))
    assert set(called) == {0}


def test_temperature_top_k_and_top_p_act():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = logits.double().softmax(-1)
    torch.testing.assert_close(text_sampler.probabilities(logits, 1.0, 0, 1.0), p)
    torch.testing.assert_close(text_sampler.probabilities(logits, 0.5, 0, 1.0), (2 * logits.double()).softmax(-1))
    assert (text_sampler.probabilities(logits, 1.0, 2, 1.0) > 0).tolist() == [[True, True, False, False]]
    assert (text_sampler.probabilities(logits, 1.0, 0, 0.65) > 0).tolist() == [[True, True, False, False]]
    assert (text_sampler.probabilities(logits, 1.0, 0, 0.64) > 0).tolist() == [[True, False, False, False]]
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    shares = np.bincount(text_sampler.choose(p.expand(1000, 4), uniform), minlength=4) / 1000
    np.testing.assert_allclose(shares, p[0], atol=1e-3)
    model, none = random_model(text_config("concat")), torch.zeros((2, 0), dtype=torch.int64)
    greedy = [text_sampler.generate(model, none, TextSamplerConfig(steps=4, length=4, top_k=1, seed=seed)) for seed in (0, 1)]
    assert not torch.equal(greedy[0], greedy[1])  # the starting noise is left, so top_k=1 is not one text


# ---------------------------------------------------------------------------------------------------------------------
# Masked diffusion


class Uniform(nn.Module):
    """A network that knows nothing: equal logits for every token."""

    def __init__(self, vocabulary: int, width: int = 4) -> None:
        super().__init__()
        self.vocabulary, self.heads = vocabulary, 2
        self.tokens = nn.Embedding(vocabulary + 1, width)

    def forward(self, attend, tokens, *_, **__) -> Tensor:
        return self.tokens.weight.new_zeros((*tokens.shape, self.vocabulary))


def flat_rows(tokens: np.ndarray, context: int) -> Rows:
    return cut_rows(TokenSplit(tokens, np.array([len(tokens)]), len(tokens)), context, "stream", "test")


def masked_model(partition: Partition, networks: list[nn.Module], vocabulary: int, epsilon: float = 1e-4) -> LanguageModel:
    objective = MaskedDiffusion(UniformLevels(), partition, 0.0, vocabulary, False, 0, epsilon)
    return LanguageModel(None, objective, {f"block_{b}": network for b, network in enumerate(networks)})


def test_a_uniform_model_scores_log2_of_27_bits_per_character():
    rows = flat_rows(np.random.default_rng(0).integers(27, size=1000).astype(np.uint8), 32)
    settings = {"count": None, "batch_size": 8, "seed": 0}
    plain = NextToken(UniformLevels(), Partition((1.0, 0.0)), 0.0, 27, False, 0, 0, 1)
    exact = text_scores.likelihood(LanguageModel(None, plain, {"block_0": Uniform(27)}), rows, draws=1, **settings)
    assert exact["scores"]["bits_per_character"] == pytest.approx(math.log2(27), abs=1e-6)
    for blocks in (1, 3):
        partition = make_partition("equi_probability", blocks, UniformLevels())
        model = masked_model(partition, [Uniform(27)] * blocks, 27)
        found = text_scores.likelihood(model, rows, draws=24 // blocks, **settings)
        assert found["scores"]["bits_per_character"] == pytest.approx(4.755, rel=0.02)
        for block in range(blocks):
            assert found["scores"][f"nats_block_{block}"] == pytest.approx(math.log(27) / blocks, rel=0.1)
        assert found["protocol"]["tokens"] == 1000


class TableDenoiser(nn.Module):
    """Predicts every place of a text of 3 symbols from what is seen: one row of a random table for each pattern."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__()
        self.length, self.heads = length, 1
        self.tokens = nn.Embedding(4, 2)
        self.table = nn.Parameter(1.5 * torch.randn((4**length, length, 3), generator=generator(seed, "table")))

    def forward(self, attend, seen, *_, **__) -> Tensor:
        return self.table[(seen * 4 ** torch.arange(self.length)).sum(1)]


def enumerated(network: TableDenoiser, x: tuple[int, ...]) -> tuple[float, float]:
    """Returns ln p(x) of the sampler that opens places in random order, and the mean over orders of each order's ln p(x)."""
    found = []
    for order in itertools.permutations(range(len(x))):
        seen, total = torch.full((1, len(x)), 3), 0.0
        for place in order:
            total += network(None, seen)[0, place].log_softmax(-1)[x[place]].item()
            seen[0, place] = x[place]
        found.append(total)
    return math.log(np.mean(np.exp(found))), float(np.mean(found))


def test_masked_estimates_converge_to_enumeration_and_the_bound_is_below_the_likelihood():
    length = 3
    network = TableDenoiser(length, 0)
    partition = make_partition("equi_probability", 2, UniformLevels())
    model = masked_model(partition, [network, network], 3, epsilon=1e-6)
    errors = []
    for x in [(0, 1, 2), (2, 2, 0), (1, 0, 0)]:
        likelihood, bound = enumerated(network, x)
        assert bound < likelihood
        rows = flat_rows(np.tile(np.array(x, dtype=np.uint8), 500), length)
        for draws, tolerance in ((1, 0.15), (16, 0.02)):
            scores = text_scores.likelihood(model, rows, count=None, batch_size=500, draws=draws, seed=1)["scores"]
            errors.append((draws, abs(length * scores["nats_per_token"] + bound)))
            assert errors[-1][1] < tolerance * length
    assert sum(e for draws, e in errors if draws == 16) < 0.5 * sum(e for draws, e in errors if draws == 1)


def test_masked_blocks_partition_alpha_and_train_on_widened_intervals():
    objective = build_objective(text_config("masked", partition={"num_blocks": 4, "overlap": 0.05}))
    assert objective.partition.edges == (1.0, 0.75, 0.5, 0.25, 0.0)
    np.testing.assert_allclose([objective.interval(b) for b in (0, 1, 3)], [(0.7375, 1.0), (0.4875, 0.7625), (0.0, 0.2625)])
    assert objective.partition.block_of(1.0) == 0  # the first layers have the most masked
    t = objective.antithetic(8, 0.5, 0.75, torch.tensor(0.9, dtype=torch.float64))
    np.testing.assert_allclose(np.diff(np.sort(t.numpy())), 0.25 / 8)
    assert objective.alpha(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1 - 1e-4, 1e-4])
    edges = equal_shares([0.0, 0.5, 1.0], [3.0, 1.0], 2)
    assert edges == pytest.approx([1.0, 1 / 3, 0.0])


def test_masked_sampling_follows_the_enumerated_distribution_and_keeps_the_prompt():
    network = TableDenoiser(2, 3)
    model = masked_model(Partition((1.0, 0.5, 0.0)), [network, network], 3)
    n = 4000
    drawn = text_sampler.generate(model, torch.zeros((n, 0), dtype=torch.int64), TextSamplerConfig(steps=12, length=2))
    shares = np.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=9) / n
    # With finitely many steps both places can open in one: this is the sampler's own distribution, enumerated.
    grid, p = text_sampler.cosine_grid(12), np.zeros(9)
    state = {(3, 3): 1.0}
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        alpha_t, alpha_s = model.objective.alpha(torch.tensor([t, s], dtype=torch.float64)).tolist()
        opened, after = (alpha_s - alpha_t) / (1 - alpha_t), {}
        for seen, mass in state.items():
            choice = network(None, torch.tensor([seen]))[0].softmax(-1)
            places = [[(v, 1.0)] if v < 3 else [(3, 1 - opened), *((k, opened * choice[i, k].item()) for k in range(3))]
                      for i, v in enumerate(seen)]  # fmt: skip
            for (a, pa), (b, pb) in itertools.product(*places):
                after[a, b] = after.get((a, b), 0.0) + mass * pa * pb
        state = after
    for (a, b), mass in state.items():
        if a < 3 and b < 3:
            p[3 * a + b] += mass
    assert 1 - p.sum() < 1e-3  # what is left to the argmax at the end
    np.testing.assert_allclose(shares, p, atol=4 * math.sqrt(0.25 / n))
    kept = text_sampler.generate(model, torch.tensor([[2]]), TextSamplerConfig(steps=3, length=1))
    assert kept[0, 0] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Token diffusion's bound


class Posterior(nn.Module):
    """The exact posterior of a token under a prior, sharpened by a factor; 1 is exact."""

    def __init__(self, table: Tensor, prior: Tensor, sharpness: float = 1.0) -> None:
        super().__init__()
        self.heads = 1
        self.tokens = nn.Embedding(len(table) + 1, table.shape[1])
        self.table, self.prior, self.sharpness = table, prior, sharpness

    def forward(self, attend, tokens, z_in, c_noise) -> Tensor:
        sigma = (4 * c_noise[:, : z_in.shape[1]]).double().exp()[..., None]  # (N, T, 1)
        z = z_in.double() * (sigma**2 + 0.25).sqrt()
        distance = (z[..., None, :] - self.table).square().sum(-1)  # (N, T, V)
        return self.prior.log() - self.sharpness * distance / (2 * sigma**2)


def toy_model(sharpness: float, blocks: int = 3) -> tuple[LanguageModel, Tensor]:
    angles = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    table = torch.stack([angles.cos(), angles.sin()], dim=1)  # unit vectors in the plane, at unequal distances
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    distribution = LogNormalLevels()
    partition = make_partition("equi_probability", blocks, distribution)
    objective = TokenDiffusion(distribution, partition, 0.1, 3, False, 0, 0.5, "concat", "none", table.float())
    networks = {f"block_{b}": Posterior(table, prior, sharpness) for b in range(blocks)}
    return LanguageModel(None, objective, networks), prior


@pytest.mark.parametrize("symbol", [0, 1, 2])
def test_the_bound_is_tight_for_an_exact_posterior(symbol: int):
    model, prior = toy_model(1.0)
    rows = flat_rows(np.full(4000, symbol, dtype=np.uint8), 100)
    scores = text_scores.likelihood(model, rows, count=None, batch_size=40, draws=12, seed=0)["scores"]
    assert scores["nats_per_token"] == pytest.approx(-math.log(prior[symbol]), abs=0.02)
    assert scores["cross_entropy_sigma_max"] == pytest.approx(-math.log(prior[symbol]), abs=0.02)
    parts = sum(scores[f"nats_block_{b}"] for b in range(3)) + scores["reconstruction"] + scores["prior"]
    assert parts == pytest.approx(scores["nats_per_token"])


def simulated_likelihood(sharpness: float, steps: int) -> np.ndarray:
    """Returns p(x) of a model on a line, by carrying its density down a grid through Gaussian steps: no bound, no sampling.

    Three symbols at -1, 0, 1; levels from 6 to .15 in `steps` steps of the reverse process with the network's D in e's place,
    then a draw from the network's prediction. Also the negative bound of the same discrete process, by quadrature.
    """
    e, prior = np.array([-1.0, 0.0, 1.0]), np.array([0.5, 0.3, 0.2])
    grid = np.linspace(-30, 30, 2401)
    dx = grid[1] - grid[0]
    sigma = np.geomspace(6.0, 0.15, steps + 1)

    def predict(z: np.ndarray, s: float) -> np.ndarray:
        logits = np.log(prior) - sharpness * (z[:, None] - e) ** 2 / (2 * s**2)
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    def normal(x: np.ndarray, mean: np.ndarray, deviation: float) -> np.ndarray:
        return np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / (deviation * math.sqrt(2 * math.pi))

    density = normal(grid, 0.0, sigma[0])
    bound = (e**2) / (2 * sigma[0] ** 2)
    for above, below in zip(sigma[:-1], sigma[1:], strict=True):
        ratio = (below / above) ** 2
        deviation = below * math.sqrt(1 - ratio)
        guess = predict(grid, above) @ e
        mean = ratio * grid + (1 - ratio) * guess
        for index, symbol in enumerate(e):
            weight = normal(grid, symbol, above) * dx
            bound[index] += (weight * ((1 - ratio) * (symbol - guess)) ** 2).sum() / (2 * deviation**2)
        kept = density > 1e-14
        density = (normal(grid[:, None], mean[None, kept], deviation) * density[kept]).sum(1) * dx
    last = predict(grid, sigma[-1])
    likelihood = (density[:, None] * last).sum(0) * dx
    for index, symbol in enumerate(e):
        bound[index] -= (normal(grid, symbol, sigma[-1]) * np.log(last[:, index].clip(1e-300)) * dx).sum()
    return np.stack([likelihood, bound])


def test_the_bound_is_never_above_the_likelihood_and_tight_in_the_limit_for_an_exact_posterior_alone():
    gaps = {}
    for sharpness, steps in itertools.product((1.0, 0.5), (20, 40)):
        likelihood, bound = simulated_likelihood(sharpness, steps)
        assert likelihood.sum() == pytest.approx(1.0, abs=1e-3)
        gaps[sharpness, steps] = np.log(likelihood) + bound
        assert (gaps[sharpness, steps] > -1e-6).all()  # the bound is below
    exact, blunt = (2 * gaps[sharpness, 40] - gaps[sharpness, 20] for sharpness in (1.0, 0.5))  # what halving steps leaves
    assert np.abs(exact).max() < 0.03 and blunt.min() > 0.03


def test_embeddings_alone_give_away_everything_at_low_noise_and_nothing_at_high():
    table = F.normalize(torch.randn((27, 64), generator=generator(0, "t")), dim=1)
    shares = np.full(27, 1 / 27)
    low, middle, high = text_scores.given_away(table, shares, [0.01, 0.5, 80.0], seed=0)
    assert low == pytest.approx(math.log(27)) and 0.2 < middle < 3.2 and high == pytest.approx(0.0, abs=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Training


def batch_of(config: Config, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tokens, torch.zeros_like(tokens), torch.full(tokens.shape, 1 / tokens.shape[1])


def test_gradients_of_the_truncated_recurrence_are_those_of_the_last_repetitions():
    config = text_config("next_token", recurrent=True, model={"recurrence": 12.0, "backpropagated": 8})
    model, tokens = random_model(config), torch.randint(27, (2, 6), generator=generator(0, "t"))
    network, objective = model.network(0).double(), model.objective
    before = text_model.tokens_before(tokens, torch.zeros_like(tokens), 27)
    state = torch.randn((2, 6, 16), dtype=torch.float64, generator=generator(0, "s"))

    def attend() -> TokenAttention:
        return objective.attend(network, "causal", torch.zeros_like(tokens))

    network(attend(), before, state=state, without_gradient=5, with_gradient=8).square().sum().backward()
    truncated = [value.grad.clone() for value in network.parameters()]
    network.zero_grad()

    given = network.tokens(before)
    for layer in network.prelude:
        given = layer(given, None, attend())
    states = [state]
    for _ in range(13):
        states.append(network.repeat(states[-1] if len(states) != 6 else states[-1].detach(), given, None, attend()))
    x = network.norm(states[-1])
    for layer in network.coda:
        x = layer(x, None, attend())
    network.head(x, None, network.tokens.weight).square().sum().backward()
    for ours, value in zip(truncated, network.parameters(), strict=True):
        torch.testing.assert_close(ours, value.grad)
    whole = [value.clone() for value in truncated]
    network.zero_grad()
    network(attend(), before, state=state, with_gradient=13).square().sum().backward()
    assert any(not torch.allclose(a, value.grad) for a, value in zip(whole, network.parameters(), strict=True))


def test_repetitions_have_huginns_distribution():
    config = text_config("next_token", recurrent=True, model={"recurrence": 32.0, "backpropagated": 8})
    objective = build_objective(config)
    drawn = np.array([objective.repetitions(Draw(0, step, 4, slice(0, 4))) for step in range(4000)])
    assert drawn.sum(1).mean() == pytest.approx(33.0, abs=1.0) and np.median(drawn.sum(1)) == pytest.approx(29, abs=1)
    assert drawn[:, 1].max() == 8 and drawn[:, 1].mean() == pytest.approx(7.98, abs=0.03)


@pytest.mark.parametrize(("kind", "recurrent"), [*KINDS, ("masked", False)])
def test_a_blocks_step_needs_no_other_block_and_micro_batches_change_rounding_only(kind: str, recurrent: bool):
    config = text_config(kind, recurrent=recurrent)
    model, tokens = random_model(config), torch.randint(27, (4, 12), generator=generator(0, "t"))
    last = model.objective.partition.num_blocks - 1
    batch = batch_of(config, tokens)
    own = {"block_0": None, f"block_{last}": model.network(last)}
    whole = model.objective.training_loss(own, batch, Draw(last, 7, 4, slice(0, 4)), None)
    parts = [
        model.objective.training_loss(own, tuple(item[rows] for item in batch), Draw(last, 7, 4, rows), None)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert whole.shape == (4,) and torch.isfinite(whole).all()
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("layout", ["concat", "inline"])
def test_every_token_has_a_level_of_its_blocks_interval_and_its_own_weight(layout: str, monkeypatch: pytest.MonkeyPatch):
    config = text_config(layout, objective={"weighting": "per_sample"})
    model, tokens = random_model(config), torch.randint(27, (4, 12), generator=generator(0, "t"))
    seen = {}
    original = TokenDiffusion.logits

    def spy(self, network, z, sigma, *rest):
        seen["sigma"], seen["logits"] = sigma, original(self, network, z, sigma, *rest)
        return seen["logits"]

    monkeypatch.setattr(TokenDiffusion, "logits", spy)
    loss = model.objective.training_loss(model.modules, batch_of(config, tokens), Draw(1, 0, 4, slice(0, 4)), None)
    low, high = model.objective.interval(1)
    sigma = seen["sigma"]
    assert sigma.unique().numel() == sigma.numel() and low <= sigma.min() and sigma.max() <= high
    losses = F.cross_entropy(seen["logits"].transpose(1, 2), tokens, reduction="none")
    torch.testing.assert_close(loss, ((16 + 1 / sigma.square()) * losses).mean(1).float())


def test_a_block_that_has_not_been_trained_reads_its_token_off_a_clean_embedding():
    config = text_config("concat", model={"width": 64})
    tokens = torch.randint(27, (8, 12), generator=generator(0, "t"))
    objective, network = build_objective(config), build_module(config, "block_0")
    sigma = torch.full(tokens.shape, 0.01, dtype=torch.float64)
    logits = objective.logits(network, objective.fixed[tokens], sigma, tokens, torch.zeros_like(tokens))
    assert torch.equal(logits.argmax(-1), tokens)


def test_learned_embeddings_are_shared_and_normalised_where_they_are_looked_up():
    config = text_config("concat", objective={"table": "learned"})
    assert text.trained_parts(config, 1) == ["block_1", "shared"]
    model = random_model(config)
    table = model.objective.table(model.modules, model.device)
    torch.testing.assert_close(table.norm(dim=1), torch.ones(27))
    tokens = torch.randint(27, (4, 12), generator=generator(0, "t"))
    model.objective.training_loss(model.modules, batch_of(config, tokens), Draw(0, 0, 4, slice(0, 4)), None).sum().backward()
    assert model.modules["shared"].weight.grad.abs().sum() > 0
    fixed = [build_objective(text_config("concat", partition={"num_blocks": blocks})).fixed for blocks in (2, 4)]
    assert torch.equal(*fixed)  # of the seed alone, so that blocks can train apart


# ---------------------------------------------------------------------------------------------------------------------
# Data


def split_of(lengths: list[int]) -> TokenSplit:
    return TokenSplit(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths), sum(lengths))


def test_a_stream_counts_every_token_once():
    rows = cut_rows(split_of([10, 13]), 5, "stream", "train")
    tokens, _, counts = rows.take(np.arange(len(rows)))
    assert tokens[counts].tolist() == list(range(23)) and tokens.shape == (5, 5)


def test_packed_documents_are_whole_and_count_every_token_once():
    lengths = [3, 2, 4, 1, 1, 5, 2]
    rows = cut_rows(split_of(lengths), 5, "documents", "train")
    tokens, documents, counts = rows.take(np.arange(len(rows)))
    assert tokens[counts].tolist() == list(range(18))
    assert (documents[~counts] == PADDING).all()
    for number, length in enumerate(lengths):
        assert (documents == number).sum() == length and len((documents == number).any(1).nonzero()) == 1
    before = text_model.tokens_before(tokens, documents, 99)
    assert before[0].tolist() == [99, 0, 1, 99, 3] and tokens[0].tolist() == [0, 1, 2, 3, 4]


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    rows = cut_rows(split_of([3, 2, 4, 1, 1, 5, 2]), 5, "documents", "train")
    source = TokenSource(TextData("t", text_data.Bytes(), rows, rows, ""), "cpu", seed=0)
    tokens, _, weights = source.batch(0, 0, 3)
    again = torch.cat([source.batch(0, 0, 3, rows)[2] for rows in (slice(0, 2), slice(2, 3))])
    assert torch.equal(weights, again)
    values = tokens.float()
    assert (values * weights).sum() / 3 == pytest.approx(float(values[weights > 0].mean()))


def test_topics_are_in_27_symbols_and_found_again_in_the_cache(cache: Path):
    settings = TextConfig("topics", context=64, cache=str(cache))
    data = text_data.load_text(settings)
    whole = text_data.to_symbols(text_data.topics_text())
    train, test = (data.tokenizer.decode(rows.split.tokens) for rows in (data.train, data.test))
    assert whole.startswith(train) and whole.endswith(test) and len(test) == len(whole) - int(0.95 * len(whole))
    assert set(whole) == set(text_data.SYMBOLS) and "  " not in whole
    assert text_data.load_text(settings).fingerprint == data.fingerprint
    assert len(list(cache.glob("text_*"))) == 1


def test_words_are_one_token_each_and_round_trip():
    words, text_ = text_data.load_tokenizer("words"), "the function xqzzk is a  statement"
    tokens = words.encode(text_)
    assert words.decode(tokens) == text_ and len(tokens) == 4 + 6 + 1 + 9 and words.size == 1027
    topics = text_data.to_symbols(text_data.topics_text())
    assert words.decode(words.encode(topics)) == topics and len(words.encode(topics)) < len(topics) / 3


def test_files_of_every_kind_hold_the_same_text(tmp_path: Path):
    import pyarrow as pa
    from datasets import Dataset
    from pyarrow import parquet

    lines = {"train": ["one two three", "four", "five six"], "test": ["seven eight"]}
    found = []
    for kind in ("txt", "parquet", "arrow"):
        folder = tmp_path / kind
        folder.mkdir()
        for split, documents in lines.items():
            if kind == "txt":
                (folder / f"{split}.txt").write_text("\n".join(documents) + "\n")
            elif kind == "parquet":
                parquet.write_table(pa.table({"text": documents}), folder / f"{split}.parquet")
            else:
                Dataset.from_dict({"text": documents}).save_to_disk(folder / "saved")
                next((folder / "saved").glob("*.arrow")).rename(folder / f"{split}.arrow")
        settings = TextConfig("files", path=str(folder), context=16, packing="documents", cache=str(tmp_path / "cache"))
        found.append(text_data.load_text(settings))
    assert len({data.fingerprint for data in found}) == 1
    assert found[0].train.split.ends.tolist() == [13, 17, 25]
    cut = TextConfig("files", path=str(tmp_path / "one.txt"), context=2, tokenizer="bytes", cache=str(tmp_path / "cache"))
    (tmp_path / "one.txt").write_text("x" * 90 + "y" * 5 + "z" * 5)
    assert bytes(text_data.load_text(cut).test.split.tokens) == b"zzzzz"


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        ("", {}, "is empty"),
        ("short", {"context": 64}, "less than one row"),
        ("a bc\n" * 40 + "a long line", {"packing": "documents", "context": 8}, "documents of the"),
        ("Capital", {"context": 2}, "knows a to z"),
        ("text", {"name": "text8", "tokenizer": "bytes"}, "must be symbols for text8"),
        ("text", {"tokenizer": "nowhere.json"}, "there is no such file"),
        ("text", {"tokenizer": "no-such-model"}, "HF_HUB_OFFLINE"),
        ("text", {"test_split": "test"}, "no meaning"),
        ("text", {"path": "nowhere"}, "does not exist"),
        ("text", {"path": None}, "data.path is needed"),
        ("text", {"name": "hub", "path": "no/such_set"}, "HF_HUB_OFFLINE"),
    ],
)
def test_bad_text_is_refused_in_a_sentence(
    content: str, settings: dict, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file.txt").write_text(content)
    plain = {"name": "files", "path": str(tmp_path / "file.txt"), "context": 4, "cache": str(tmp_path / "cache")}
    with pytest.raises(SettingError, match=sentence):
        text_data.load_text(TextConfig(**{**plain, **settings}))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.parquet", b"junk", "a.parquet cannot be read"),
        ("a.arrow", b"junk", "a.arrow cannot be read"),
        ("a.parquet", {"other": ["text"] * 40}, "data.text_column=text is not in"),
        ("a.parquet", {"text": [1, 2] * 40}, "holds no text, but int64"),
        ("a.parquet", {"text": [["a"]] * 40}, "holds no text"),
        ("a.parquet", {"text": [None, None] * 40}, "is empty"),
    ],
)
def test_damaged_files_and_wrong_columns_are_refused_in_a_sentence(
    name: str, content: bytes | dict, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        parquet.write_table(pyarrow.table(content), path)
    with pytest.raises(SettingError, match=sentence) as caught:
        text_data.load_text(TextConfig("files", path=str(path), context=4, tokenizer="bytes", cache=str(tmp_path / "cache")))
    assert "\n" not in str(caught.value)


def word_tokenizer(path: Path, *words: str, **numbers: int) -> Any:
    """Writes a tokenizer of whole words, numbered in their order or as given, and returns it."""
    import tokenizers

    known = {word: number for number, word in enumerate(words)} | numbers
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token=words[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(path))
    return inner


def test_a_tokenizer_is_given_the_whole_text(tmp_path: Path):
    """Truncation and padding, which many files of tokenizers come with, are for batches of sentences."""
    inner = word_tokenizer(tmp_path / "plain.json", "</s>", "the", "cat")
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "cutting.json"))
    plain, cutting = (text_data.Subwords(str(tmp_path / name)) for name in ("plain.json", "cutting.json"))
    assert cutting.encode("the cat " * 9).tolist() == [1, 2] * 9 and len(cutting.encode("the")) == 1
    assert plain.fingerprint == cutting.fingerprint
    assert plain.separator == 0


def test_tokens_are_numbered_with_gaps_or_are_too_few(tmp_path: Path):
    word_tokenizer(tmp_path / "gaps.json", "none", "the", cat=9)
    assert text_data.Subwords(str(tmp_path / "gaps.json")).size == 10
    word_tokenizer(tmp_path / "one.json", "none")
    with pytest.raises(SettingError, match="one.json knows 1 tokens"):
        text_data.Subwords(str(tmp_path / "one.json"))


@pytest.mark.parametrize("harm", ["cut", "gone", "meta", "swapped"])
def test_a_damaged_cache_of_tokens_is_made_again(harm: str, tmp_path: Path):
    (tmp_path / "file.txt").write_text("the cat sat on the mat " * 50)
    settings = TextConfig("files", path=str(tmp_path / "file.txt"), context=4, cache=str(tmp_path / "cache"))
    before = text_data.load_text(settings)
    (entry,) = (tmp_path / "cache").iterdir()
    tokens = entry / "train.npy"
    if harm == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-50])
    elif harm == "gone":
        tokens.unlink()
    elif harm == "meta":
        (entry / "meta.json").write_text("{")
    else:
        np.save(tokens, np.zeros(7, dtype=np.uint8))
    again = text_data.load_text(settings)
    assert again.fingerprint == before.fingerprint and len(again.train) == len(before.train)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("the cat sat on the mat")
    with pytest.raises(SettingError, match="data.cache"):
        text_data.check_text(TextConfig("files", path=str(tmp_path / "file"), context=4, cache=str(tmp_path / "file" / "cache")))


# ---------------------------------------------------------------------------------------------------------------------
# Scores of generated text


def test_word_scores_see_repetition_and_unknown_words():
    known = {"the", "cat", "sat", "on", "a", "mat"}
    good = text_scores.word_scores(["the cat sat on a mat", "a cat sat on the mat"], known)
    assert good["known_words"] == 1 and good["distinct_2"] == pytest.approx(8 / 10) and good["repetition"] == 0
    stuck = text_scores.word_scores(["the the the the the the", "the the the the the the"], known)
    assert stuck["known_words"] == 1 and stuck["distinct_2"] == pytest.approx(1 / 10) and stuck["entropy"] == 0
    assert stuck["repetition"] == pytest.approx(2 / 3) and stuck["entropy"] < good["entropy"]
    assert text_scores.word_scores(["xqz the"], known)["known_words"] == 0.5
    assert (
        text_scores.at_matched_entropy([1.0, 2.0], [10.0, 30.0], 1.5) == 20
        and text_scores.at_matched_entropy([1], [2], 3) is None
    )


def test_a_repeated_word_has_a_low_perplexity_and_the_scores_beside_it_show_why(tiny_gpt2: str):
    stuck, varied = ["the the the the the the"] * 2, ["a zebra quietly vexed jumping fox"] * 2
    device = torch.device("cpu")
    assert text_scores.generative_perplexity(stuck, tiny_gpt2, device) < text_scores.generative_perplexity(
        varied, tiny_gpt2, device
    )
    assert text_scores.word_scores(stuck, None)["entropy"] < text_scores.word_scores(varied, None)["entropy"]
    assert text_scores.text_features(varied, tiny_gpt2, device).shape == (2, 16)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 of one layer with a tokenizer of its own, in a folder; its head favours the token `the`."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator([text_data.to_symbols(text_data.topics_text())], trainers.BpeTrainer(vocab_size=300))
    folder = str(tmp_path_factory.mktemp("gpt2"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=inner.get_vocab_size(), **sizes))
    the = inner.token_to_id("the")
    model.transformer.ln_f.bias.data.fill_(0.5)
    model.transformer.wte.weight.data[the] += 0.5
    model.save_pretrained(folder)
    return folder
