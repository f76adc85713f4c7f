"""The other methods: closed forms of their losses, gradients that stay where they belong, exact resume."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_classifier
from test_train import Killed, state

import baselines
import classification
import config as configuration
import pipeline
import train as training
from baselines import Inference, NoProp, cosine_signal, goodness, posterior_coefficients, prior_divergence, supervised_contrastive
from hardware import Hardware
from model import Draw, part_name

METHODS = ["end_to_end", "greedy", "local", "forward_forward", "forward_forward_plain", "noprop_dt", "noprop_ct", "noprop_fm"]
INFERENCE = Inference(None, "per_block", 0.0, "soft", 5, 0)


def network(method):
    return "cnn" if method.startswith("noprop") else "vit"


def parts_of(config):
    blocks = range(configuration.trained_blocks(config))
    names = sorted({name for block in blocks for name in classification.trained_parts(config, block)})
    modules = {name: classification.build_module(config, name) for name in names}
    for module in modules.values():  # heads begin at zero: give every parameter a gradient
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return modules


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms


def test_supervised_contrastive_by_hand():
    """Four unit vectors at 0, 60, 90 and 180 degrees, labels a a b b: cosines by hand."""
    angles = torch.tensor([0.0, math.pi / 3, math.pi / 2, math.pi])
    features = 3 * torch.stack([angles.cos(), angles.sin()], dim=1)
    tau, margin = 0.5, 0.2
    s = {(0, 1): 0.5 + margin, (0, 2): 0.0, (0, 3): -1.0, (1, 2): math.cos(math.pi / 6), (1, 3): -0.5, (2, 3): 0.0 + margin}
    s |= {(j, i): value for (i, j), value in s.items()}
    positive = {0: 1, 1: 0, 2: 3, 3: 2}
    expected = [
        -math.log(math.exp(s[i, positive[i]] / tau) / sum(math.exp(s[i, k] / tau) for k in range(4) if k != i)) for i in range(4)
    ]
    loss = supervised_contrastive(features, torch.tensor([0, 0, 1, 1]), tau, margin)
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_supervised_contrastive_averages_over_positives_and_caps_the_margin():
    features = torch.eye(2)[[0, 0, 0, 1, 1]]
    loss = supervised_contrastive(features, torch.tensor([0, 0, 0, 1, 1]), 1.0, 0.4)
    first = -(1 - math.log(2 * math.e + 2))  # positives at min(1 + .4, 1), negatives at 0
    second = -(1 - math.log(math.e + 3))
    assert loss.tolist() == pytest.approx([first] * 3 + [second] * 2, rel=1e-5)


def test_the_contrast_is_in_float32_under_autocast():
    features = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = supervised_contrastive(features.float(), torch.arange(6).repeat(2), 0.15, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = supervised_contrastive(features, torch.arange(6).repeat(2), 0.15, 0.1)
    assert loss.dtype == torch.float32 and torch.equal(loss, exact)


def test_margins_are_linear():
    objective = baselines.ContrastiveForwardForward(4, 0)
    assert [objective.margin(layer) for layer in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_goodness_by_hand():
    tokens = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 2.0]]])
    assert goodness(tokens).tolist() == pytest.approx([(4 + 9) / 2, (0 + 1) / 2])


def test_forward_forward_loss_by_hand():
    """One layer that returns the label's token alone: goodness is what the token's square says."""

    def layer(x, token=None):
        return token[:, None], None

    objective = baselines.ForwardForward(1, torch.tensor([[1.0, 1.0], [3.0, 1.0]]), seed=0)  # goodness 1 and 5
    loss = objective.training_loss(
        {"block_0": layer}, (torch.zeros(2, 1), torch.tensor([0, 1])), Draw(0, 0, 2, slice(None)), None
    )
    expected = [[2 - 1, 5 - 2], [2 - 5, 1 - 2]]  # threshold - right, wrong - threshold
    assert loss.tolist() == pytest.approx([sum(math.log1p(math.exp(v)) for v in pair) for pair in expected], rel=1e-5)
    assert objective.predict({"block_0": layer}, torch.zeros(3, 1), INFERENCE, None).argmax(-1).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("step", range(1, 11))
def test_noprop_coefficients_are_the_exact_posterior(step):
    """Condition the joint Gaussian of (z_t, z_{t-1}) on z_{t-1}, by its mean and covariance."""
    signal = cosine_signal(10)
    before, now = signal[step - 1], signal[step]
    alpha, u, seen = before / now, 0.7, -1.3
    mean = np.array([math.sqrt(now) * u, math.sqrt(before) * u])
    covariance = np.array([[1 - now, math.sqrt(alpha) * (1 - now)], [math.sqrt(alpha) * (1 - now), 1 - before]])
    gain = covariance[0, 1] / covariance[1, 1]
    expected = mean[0] + gain * (seen - mean[1]), covariance[0, 0] - gain * covariance[0, 1]
    a, b, c = posterior_coefficients(before, now)
    assert (a * u + b * seen, c) == pytest.approx(expected, rel=1e-9)


def test_noprop_signal_grows_from_nothing():
    signal = cosine_signal(10)
    assert signal[0] == 0 and 0.999 < signal[-1] < 1 and (np.diff(signal) > 0).all()


def test_prior_divergence():
    u = torch.tensor([[0.3, -0.4], [1.0, 2.0]])
    q = torch.distributions.Normal(0.2**0.5 * u, 0.8**0.5)
    expected = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
    assert torch.allclose(prior_divergence(u, 0.2), expected)


def test_learned_schedule_decreases_and_knows_its_slope():
    torch.manual_seed(0)
    schedule = baselines.MonotoneSchedule()
    for parameter in schedule.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    t = torch.linspace(0, 1, 101, requires_grad=True)
    gamma, slope = schedule(t)
    assert (gamma.diff() < 0).all()
    (expected,) = torch.autograd.grad(gamma.sum(), t)
    assert torch.allclose(slope, expected, rtol=1e-4)
    assert (gamma[0] - gamma[-1]).item() == pytest.approx(F.softplus(schedule.span).item(), rel=1e-5)


class Oracle:
    """NoProp's networks replaced: it knows the target, by its logits or by the velocity towards it."""

    def __init__(self, table, label, velocity):
        self.table, self.label, self.velocity = table, label, velocity

    def image(self, images):
        return images

    def join(self, z, t, features):
        if self.velocity:
            return (self.table[self.label] - z) / (1 - t[:, None])
        return 1e4 * F.one_hot(torch.full((len(z),), self.label), len(self.table)).float()

    def __call__(self, z, t, images):
        return self.join(z, t, images)


@pytest.mark.parametrize("kind", ["dt", "ct", "fm"])
def test_noprop_with_a_perfect_network_arrives_at_the_target(kind):
    table = F.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    seen = []

    def head(z):
        seen.append(z)
        return z @ table.T

    schedule = baselines.MonotoneSchedule() if kind == "ct" else None
    head.weight = table
    shared = SimpleNamespace(head=head, schedule=schedule, table=lambda: table)
    objective = NoProp(kind, 4, 1.0, None, seed=0)
    modules = {"shared": shared} | {part_name(b): Oracle(table, 3, kind == "fm") for b in range(4)}
    with torch.no_grad():
        logits = objective.predict(modules, torch.zeros(6, 1), INFERENCE._replace(steps=7), None)
    assert logits[-1].argmax(-1).tolist() == [3] * 6
    last = {"dt": cosine_signal(4)[-1], "ct": torch.sigmoid(torch.tensor(7.0)).item(), "fm": 1.0}[kind]
    distance = (seen[-1] - math.sqrt(last) * table[3]).norm(dim=1)
    assert distance.max() <= 6 * math.sqrt(1 - last) + 1e-5
    if kind == "ct":  # the path keeps its noise, scaled: exact for a prediction that does not change
        noise = baselines.image_noise(0, range(6), (1, 8))[:, 0]
        first = torch.sigmoid(torch.tensor(-7.0))
        kept = (noise - first.sqrt() * table[3]) / (1 - first).sqrt()
        assert torch.allclose(seen[-1], math.sqrt(last) * table[3] + math.sqrt(1 - last) * kept, atol=1e-4)


def test_noprop_losses_by_hand():
    """A perfect network leaves the read-out's cross-entropy, the prior's divergence, and no denoising term."""
    table = F.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    shared = baselines.NoPropShared(8, 5, None, learned_schedule=True)
    torch.nn.init.zeros_(shared.head.weight), torch.nn.init.zeros_(shared.head.bias)
    batch, draw = (torch.zeros(6, 1), torch.full((6,), 3)), Draw(0, 0, 6, slice(None))
    start = torch.sigmoid(torch.tensor(-7.0)).item()
    prior = prior_divergence(table[3:4], start).item()
    for kind, extra in (("dt", 0.0), ("ct", prior)):
        modules = {"shared": shared, "block_0": Oracle(table, 3, False)}
        loss = NoProp(kind, 4, 1.0, table, seed=0).training_loss(modules, batch, draw, None)
        assert loss.tolist() == pytest.approx([math.log(5) + extra] * 6, rel=1e-4)
        wrong = {"shared": shared, "block_0": Oracle(table, 1, False)}
        more = NoProp(kind, 4, 1.0, table, seed=0).training_loss(wrong, batch, draw, None) - loss
        distance = (table[1] - table[3]).square().sum().item()
        if kind == "dt":
            snr = cosine_signal(4) / (1 - cosine_signal(4))
            assert more.tolist() == pytest.approx([4 / 2 * (snr[1] - snr[0]) * distance] * 6, rel=1e-4)
        else:
            t = baselines.draw_noise(table[[3] * 6], draw, 0)[0].float().requires_grad_()
            (rate,) = torch.autograd.grad(torch.exp(-shared.schedule(t)[0]).sum(), t)
            assert more.tolist() == pytest.approx((rate / 2 * distance).tolist(), rel=1e-3)
    modules = {"shared": shared, "block_0": Oracle(table, 3, True)}
    loss = NoProp("fm", 4, 1.0, table, seed=0).training_loss(modules, batch, draw, None)
    assert loss.tolist() == pytest.approx([math.log(5)] * 6, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Through the code that trains


@pytest.mark.parametrize("method", METHODS)
def test_gradient_stays_inside_its_block(method):
    """What a block is given needs no gradient, so that none leaves it; and parts that a step does not train get none."""
    config = make_classifier(method, network(method))
    modules, objective = parts_of(config), classification.build_objective(config)
    received = []
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: received.append((name, inputs[0].requires_grad)))
    views = 2 if method == "forward_forward" else 1
    for block in range(configuration.trained_blocks(config)):
        batch = torch.randn(views * 8, 1, 8, 8), torch.arange(8)
        objective.training_loss(modules, batch, Draw(block, 0, 8, slice(0, 8)), None).sum().backward()
        trained = classification.trained_parts(config, block)
        for name, module in modules.items():
            gradients = [parameter.grad is not None for parameter in module.parameters()]
            assert any(gradients) == (name in trained)
            module.zero_grad()
    shares = method == "noprop_ct"  # its noise follows a schedule that is learned with it, in the shared part
    assert received and any(requires for _, requires in received) == shares


@pytest.mark.parametrize("method", [*METHODS, "diffusion_blocks"])
def test_resume_is_exact_and_scores_are_written(method, cache, tmp_path, monkeypatch):
    """Killed without warning, the same command ends with the bits of a run that was not."""

    def run(folder, mode="train"):
        groups = {"data": {"cache": str(cache), "randaugment": True}, "folder": str(folder), "mode": mode}
        groups["eval"] = {"label_steps": [5]} if method in ("noprop_ct", "noprop_fm") else {}
        config = make_classifier(method, network(method), model={} if method.startswith("noprop") else {"dropout": 0.1}, **groups)
        pipeline.run(config)
        return state(folder)

    whole = run(tmp_path / "whole", "run")
    step, made = training.train_step, []
    cut = configuration.total_steps(make_classifier(method, network(method))) - 1

    def cut_off(*arguments):
        if len(made) == cut:
            raise Killed
        made.append(1)
        return step(*arguments)

    monkeypatch.setattr(training, "train_step", cut_off)
    with pytest.raises(Killed):
        run(tmp_path / "cut")
    monkeypatch.setattr(training, "train_step", step)
    assert run(tmp_path / "cut") == whole
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    first = results[0]
    assert first["kind"] == "classification" and first["protocol"]["images"] == 360
    assert {"accuracy", "top5", "cross_entropy", "shuffled_accuracy"} <= first["scores"].keys()
    assert results[-1]["kind"] == "training_cost" and all(value > 0 for value in results[-1]["scores"].values())


@pytest.mark.parametrize(("method", "block"), [("greedy", 2), ("forward_forward", 1)])
def test_what_is_finished_drops_nothing(method, block):
    """Of networks with dropout, in training, those that a step does not train give what they give in use."""
    config = make_classifier(method, model={"dropout": 0.5})
    modules, objective = parts_of(config), classification.build_objective(config)
    trained = classification.trained_parts(config, block)
    modes = []
    for name, module in modules.items():
        module.train()
        if name not in trained:
            module.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
    batch = torch.randn(8, 1, 8, 8), torch.arange(8)
    objective.training_loss(modules, batch, Draw(block, 0, 8, slice(0, 8)), None)
    assert set(modes) == {(False, False)} and all(module.training for module in modules.values())


def test_a_block_holds_its_share(cache, tmp_path):
    """Memory of a block's step at 3 blocks, in state and in activations, against the whole network's."""
    scores = {}
    for method in ("end_to_end", "diffusion_blocks"):
        config = make_classifier(method, data={"cache": str(cache)}, model={"depth": 12, "width": 32}, train={"batch_size": 64})
        parts = {name: classification.build_module(config, name) for name in map(part_name, range(config.partition.num_blocks))}
        (tmp_path / "metrics.jsonl").write_text('{"block": 0, "step": 2, "seconds": 3.0}\n')
        model = classification.build_model(config, parts, 0.5, Hardware(torch.device("cpu"), "fp32", 1))
        scores[method] = classification.cost_result(config, classification.load(config), model, tmp_path)["scores"]
    count = sum(parameter.numel() for parameter in parts["block_0"].parameters())
    assert scores["diffusion_blocks"]["state_bytes"] == 20 * count and scores["end_to_end"]["seconds_per_step"] == 1.5
    ratio = scores["diffusion_blocks"]["activation_bytes"] / scores["end_to_end"]["activation_bytes"]
    assert 1 / 3 < ratio < 0.6  # a third of the layers; adaLN and one more token come on top


@pytest.mark.parametrize(
    ("method", "steps"), [("local", 12), ("greedy", 27), ("forward_forward", 10), ("forward_forward_plain", 6)]
)
def test_methods_do_the_same_arithmetic(method, steps):
    """In layers' forward passes, a backward pass counting two: 12 steps of 3 passes through all 3 layers, 108 of one layer."""
    config = make_classifier(method, train={"steps": 12})
    assert configuration.total_steps(config) == steps
    counts = training.update_counts(0, "sequential", training.block_shares(config, None), steps)
    work = {
        "local": 9 * counts[0],
        "greedy": sum((3 + b) * counts[b] for b in range(3)) if method == "greedy" else 0,
        "forward_forward": 18 * counts[0] + 3 * counts[-1],
        "forward_forward_plain": 18 * counts[0],
    }[method]
    assert work == pytest.approx(108, rel=0.06)


def test_groups_of_a_vit_are_the_vit():
    """Without losses in between, the groups in a row compute what one network of all layers computes."""
    whole = make_classifier("end_to_end")
    parts = parts_of(make_classifier("local"))
    vit = classification.build_module(whole, "block_0")
    vit.tokens.load_state_dict(parts["block_0"].tokens.state_dict())
    for index, layer in enumerate(vit.layers):
        layer.load_state_dict(parts[part_name(index)].layers[0].state_dict())
    vit.head.load_state_dict(parts["block_2"].head.state_dict())
    x = torch.randn(4, 1, 8, 8)
    logits = classification.build_objective(make_classifier("local")).predict(parts, x, INFERENCE, None)
    assert logits.shape == (3, 4, 10) and torch.allclose(logits[-1], vit(x)[1], atol=1e-6)
