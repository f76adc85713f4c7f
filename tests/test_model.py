"""Objective, blocks and routing: what is drawn, what is weighted, which block runs."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import make_config

import sampler
from config import SamplerConfig, SettingError
from dblock_modules import WEIGHTINGS
from hardware import Hardware
from model import Draw, build_model, build_module, build_objective, part_name

CPU = Hardware(torch.device("cpu"), "fp32", 1)
WHOLE = slice(None)


def random_model(config, scale=0.5):
    """A model whose blocks differ and whose outputs are not zero."""
    modules = {}
    for block in range(config.partition.num_blocks):
        name = part_name(block)
        modules[name] = build_module(config, name)
        torch.manual_seed(block)
        for parameter in modules[name].parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return build_model(config, modules, scale, CPU), modules


@pytest.mark.parametrize("block", [0, 1, 2])
def test_levels_lie_in_the_widened_interval(block):
    objective = build_objective(make_config(partition={"overlap": 0.1}))
    sigma = torch.cat([objective.add_noise(torch.zeros(64, 1, 2, 2), Draw(block, step, 64, WHOLE))[1] for step in range(40)])
    low, high = objective.interval(block)
    own_low, own_high = objective.partition.interval(block)
    assert sigma.min() >= low and sigma.max() <= high
    outside = ((sigma < own_low) | (sigma > own_high)).double().mean()
    assert outside == pytest.approx({0: 1 - 0.671, 1: 1 - 0.844, 2: 1 - 0.698}[block], abs=0.035)  # facts: home share


def test_noise_has_the_level_that_is_reported():
    objective = build_objective(make_config())
    z, sigma = objective.add_noise(torch.zeros(16, 1, 64, 64), Draw(0, 0, 16, WHOLE))
    assert (z.flatten(1).std(1).double() / sigma).tolist() == pytest.approx([1] * 16, abs=0.05)


def test_rows_are_slices_of_the_whole_batch():
    objective = build_objective(make_config())
    x, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    whole = objective.add_noise(x, Draw(1, 5, 8, WHOLE))
    dropped = objective.drop_labels(labels, Draw(1, 5, 8, WHOLE))
    for rows in (slice(0, 3), slice(3, 8)):
        part = objective.add_noise(x[rows], Draw(1, 5, 8, rows))
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
        assert torch.equal(objective.drop_labels(labels[rows], Draw(1, 5, 8, rows)), dropped[rows])


def test_streams_differ_by_block_and_step():
    objective = build_objective(make_config(partition={"num_blocks": 1}))
    draws = [objective.add_noise(torch.zeros(4, 1, 8, 8), Draw(b, s, 4, WHOLE))[0] for b in (0,) for s in (0, 1, 2)]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    objective = build_objective(make_config(partition={"overlap": 0.2}))
    one, two = (objective.add_noise(torch.zeros(4, 1, 8, 8), Draw(b, 0, 4, WHOLE)) for b in (0, 1))
    assert not torch.equal(one[0] / one[1].view(-1, 1, 1, 1), two[0] / two[1].view(-1, 1, 1, 1))


def test_label_dropout_has_its_rate():
    objective = build_objective(make_config(train={"label_dropout": 0.1}))
    labels = torch.zeros(4000, dtype=torch.int64)
    dropped = objective.drop_labels(labels, Draw(0, 0, 4000, WHOLE))
    assert set(dropped.tolist()) == {0, 10}
    assert (dropped == 10).double().mean() == pytest.approx(0.1, abs=0.015)
    assert (build_objective(make_config(train={"label_dropout": 0.0})).drop_labels(labels, Draw(0, 0, 4000, WHOLE)) == 0).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weight_is_per_sample(weighting):
    """With unequal levels, mean(w_i e_i), not mean(w) mean(e): (N,) against (N, 1) would broadcast to (N, N)."""
    objective = build_objective(make_config(objective={"weighting": weighting}))
    x, z = torch.randn(5, 1, 8, 8), torch.randn(5, 1, 8, 8)
    sigma = torch.tensor([0.002, 0.02, 0.3, 5.0, 80.0], dtype=torch.float64)

    def backbone(x_in, c_noise, condition):
        return torch.sin(3 * x_in + c_noise.view(-1, 1, 1, 1))

    loss = objective.loss(backbone, x, z, sigma, None)
    assert loss.shape == (5,) and loss.dtype == torch.float32
    for i in range(5):
        d = objective.denoise(backbone, z[i : i + 1], sigma[i : i + 1], None)
        expected = WEIGHTINGS[weighting](sigma[i], 0.5) * (d - x[i : i + 1]).double().square().mean()
        assert float(loss[i]) == pytest.approx(float(expected), rel=1e-4)


def test_zero_network_has_unit_loss():
    """F = 0 leaves D = c_skip z: for data of standard deviation sigma_data the weighted loss is 1 at every level."""
    objective = build_objective(make_config())
    x = 0.5 * torch.randn(2000, 1, 8, 8)

    def zero(x_in, c_noise, condition):
        return torch.zeros_like(x_in)

    for level in (0.002, 0.1, 1.0, 80.0):
        sigma = torch.full((2000,), level, dtype=torch.float64)
        z = x + level * torch.randn(x.shape)
        assert objective.loss(zero, x, z, sigma, None).mean() == pytest.approx(1, abs=0.02)


def test_coefficients_stay_float32_under_autocast():
    objective = build_objective(make_config())
    seen = {}

    def backbone(x_in, c_noise, condition):
        seen["in"] = (x_in.dtype, c_noise.dtype)
        product = x_in.flatten(1) @ torch.zeros(64, 64)
        assert product.dtype == torch.bfloat16
        return product.reshape(x_in.shape)

    z, sigma = torch.randn(3, 1, 8, 8), torch.tensor([0.002, 0.3, 80.0], dtype=torch.float64)
    d = objective.denoise(backbone, z, sigma, None, torch.autocast("cpu", torch.bfloat16))
    assert d.dtype == torch.float32 and seen["in"] == (torch.float32, torch.float32)
    c_skip = 0.25 / (0.25 + sigma**2)
    assert torch.allclose(d.double(), c_skip.view(-1, 1, 1, 1) * z.double(), rtol=1e-6, atol=0)


def hooked(modules):
    """Returns a list that receives (block, sorted levels) of every forward of the blocks."""
    calls = []
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: calls.append((name, float((4 * inputs[1]).exp()[0]))))
    return calls


def test_routing_is_the_same_everywhere():
    """Through forward hooks: training, evaluation and sampling run the block that owns the level, each block at least once."""
    import evaluation

    config = make_config(partition={"overlap": 0.0})
    model, modules = random_model(config)
    objective = model.objective
    calls = hooked(modules)
    for block in range(3):
        for step in range(3):
            batch = torch.randn(8, 1, 8, 8), torch.arange(8)
            objective.training_loss(modules, batch, Draw(block, step, 8, WHOLE), None)
        assert {name for name, _ in calls} == {part_name(block)}
        assert all(part_name(objective.partition.block_of(level)) == name for name, level in calls)
        calls.clear()
    grid = evaluation.loss_grid(objective.distribution, 12)
    labels = torch.arange(4)
    evaluation.heldout_loss(
        lambda z, sigma, y: model.denoiser(y)(z, sigma),
        torch.randn(4, 1, 8, 8),
        labels,
        grid,
        sigma_data=0.5,
        batch_size=4,
        seed=0,
    )
    in_evaluation = list(calls)
    calls.clear()
    settings = SamplerConfig(steps=9, schedule="per_block", num_images=4)
    sampler.sample_images(model, settings)
    in_sampling = list(calls)
    for found in (in_evaluation, in_sampling):
        assert {name for name, _ in found} == {part_name(block) for block in range(3)}
        for name, level in found:
            near_edge = any(abs(level / edge - 1) < 1e-5 for edge in objective.partition.edges)
            assert near_edge or part_name(objective.partition.block_of(level)) == name
    edges = [name for name, level in in_sampling if abs(level / objective.partition.edges[1] - 1) < 1e-5]
    assert edges == ["block_1"]  # the step that starts on an edge goes down into the block below


def test_guidance_identities():
    config = make_config()
    model, modules = random_model(config)
    z, labels = torch.randn(4, 1, 8, 8), torch.arange(4)
    calls = hooked(modules)
    conditional = model.denoiser(labels, 1.0)(z, 0.3)
    assert len(calls) == 1  # scale 1 costs one forward
    null = torch.full((4,), 10)
    unconditional = model.objective.denoise(modules["block_1"], z, torch.full((4,), 0.3).double(), null)
    assert torch.allclose(model.denoiser(labels, 0.0)(z, 0.3), unconditional, atol=1e-6)
    for scale in (0.5, 2.0, 7.5):
        guided = model.denoiser(labels, scale)(z, 0.3)
        assert torch.allclose(guided, unconditional + scale * (conditional - unconditional), atol=1e-5)
    per_block = model.denoiser(labels, [1.0, 3.0, 1.0])
    assert torch.allclose(per_block(z, 0.3), model.denoiser(labels, 3.0)(z, 0.3))
    assert torch.allclose(per_block(z, 2.0), model.denoiser(labels, 1.0)(z, 2.0))
    for wrong in (-1, [1.0, 2.0], "strong"):
        with pytest.raises(SettingError, match="guidance"):
            model.denoiser(labels, wrong)
    for wrong in (torch.tensor([10]), torch.tensor([-1]), None):
        with pytest.raises(SettingError, match="labels"):
            model.denoiser(wrong)


def test_model_without_label_dropout_refuses_guidance():
    config = make_config(train={"label_dropout": 0.0})
    model, _ = random_model(config)
    model.denoiser(torch.arange(4), 1.0)
    with pytest.raises(SettingError, match="label dropout"):
        model.denoiser(torch.arange(4), 1.5)


def test_unconditional_model():
    config = make_config(data={"num_classes": 0}, train={"label_dropout": 0.0})
    model, modules = random_model(config)
    loss = model.objective.training_loss(modules, (torch.randn(4, 1, 8, 8), torch.zeros(4)), Draw(2, 0, 4, WHOLE), None)
    assert loss.shape == (4,) and torch.isfinite(loss).all()
    images, labels = sampler.sample_images(model, SamplerConfig(steps=3, num_images=2, schedule="per_block"))
    assert labels is None and images.shape == (2, 1, 8, 8)


def test_initialisation_depends_on_seed_and_part_alone():
    config = make_config()
    torch.manual_seed(1)
    one = build_module(config, "block_1").state_dict()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    build_module(config, "block_0")
    two = build_module(config, "block_1").state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())  # building draws nothing from the global generator
    other = build_module(dataclasses.replace(config, seed=1), "block_1").state_dict()
    assert not torch.equal(one["layers.0.mlp.fc1.weight"], other["layers.0.mlp.fc1.weight"])


@pytest.mark.parametrize("layers", [None, [1, 3, 2]])
def test_blocks_own_every_layer_once(layers):
    config = make_config(model={"depth": 6}, partition={"layers": layers})
    depths = [len(build_module(config, part_name(block)).layers) for block in range(3)]
    assert depths == (layers or [2, 2, 2])


def test_shallow_is_one_block_of_a_blocks_depth():
    config = make_config(model={"depth": 6}, method={"name": "shallow"})
    assert len(build_module(config, "block_0").layers) == 2
    objective = build_objective(config)
    assert objective.partition.num_blocks == 1 and objective.interval(0) == (0.002, 80.0)
    assert np.allclose(objective.partition.edges, [80, 0.002])
