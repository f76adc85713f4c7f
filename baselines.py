"""The other ways to train a classifier: end to end, greedily, locally, by forward-forward, and NoProp.

    end_to_end             ordinary backpropagation through a plain ViT
    greedy                 groups of layers in turn, each with a head of its own (Belilovsky et al., arXiv 1812.11446)
    local                  the same losses, all groups at every step, each from the detached output of the one before
    forward_forward        every layer by a supervised contrastive loss, then a linear read-out (ContrastiveFF)
    forward_forward_plain  every layer by the goodness of right against wrong labels (Hinton, arXiv 2212.13345)
    noprop_dt, _ct, _fm    denoisers of the label's embedding that never see each other (NoProp, arXiv 2503.24322)

An objective has `training_loss`, which the training loop asks for, and `predict`, which gives logits after each stage.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Source
from model import Autocast, Batch, Draw, LearnedTable, draw_noise, dropout_stream, part_name
from randomness import generator
from sampler import image_noise
from vit import LevelEmbedding, full_precision, initialize

TEMPERATURE = 0.15  # of the contrastive loss; this and the margins are ContrastiveFF's defaults
FIRST_MARGIN, LAST_MARGIN = 0.4, 0.1
THRESHOLD = 2.0  # of the goodness
READOUT = "readout"  # the part of forward-forward's linear classifier
SHARED = "shared"
ODE_STEPS = 1000  # of NoProp's continuous-time models
COSINE_OFFSET = 0.008  # keeps the last signal-to-noise ratio finite (Nichol and Dhariwal, arXiv 2102.09672, equation 17)


class Inference(NamedTuple):
    """How a prediction is drawn; a plain classifier needs none of it.

    Attributes:
        steps: of a sampler; None: the method's own number.
        initial_noise: scale of the noise that DiffusionBlocks starts from; with 0 there is none, and nothing is drawn.
        first: the place of the first image in its split, which names the noise of each image with the seed.
    """

    steps: int | None
    schedule: str
    initial_noise: float
    bridge: str
    top_k: int
    seed: int
    first: int = 0


@contextmanager
def frozen(*networks: nn.Module) -> Iterator[None]:
    """The context of networks that are finished: they get no gradient and drop nothing."""
    training = [network.training for network in networks]
    for network in networks:
        network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for network, before in zip(networks, training, strict=True):
            network.train(before)


# ---------------------------------------------------------------------------------------------------------------------
# Groups of layers with heads: end to end, local, greedy


@dataclass(frozen=True)
class Groups:
    """Groups of layers, each with a head, from detached inputs; one group is end-to-end training.

    Attributes:
        in_turn: a step trains the drawn group alone, on what the groups before it have become (greedy); otherwise all groups.
        seed: of dropout.
    """

    num_groups: int
    in_turn: bool
    seed: int

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the cross-entropy, summed over the groups that are trained, (n,); see model.Objective."""
        x, labels = batch
        last = draw.block if self.in_turn else self.num_groups - 1
        loss = torch.zeros(len(labels), device=labels.device)
        with autocast or nullcontext(), dropout_stream(self.seed, draw):
            for group in range(last + 1):
                network, trains = modules[part_name(group)], group == last or not self.in_turn
                with nullcontext() if trains else frozen(network):
                    x, logits = network(x.detach())  # (n, T, D), (n, classes)
                if trains:
                    loss = loss + F.cross_entropy(logits.float(), labels, reduction="none")  # (n,)
        return loss

    def predict(self, modules: Mapping[str, nn.Module], images: Tensor, inference: Inference, autocast: Autocast) -> Tensor:
        """Returns logits after each group, (groups, N, classes); the last is the prediction."""
        x, found = images, []
        with autocast or nullcontext():
            for group in range(self.num_groups):
                x, logits = modules[part_name(group)](x)  # (N, T, D), (N, classes)
                found.append(logits.float())
        return torch.stack(found)


# ---------------------------------------------------------------------------------------------------------------------
# Forward-forward


def supervised_contrastive(features: Tensor, labels: Tensor, temperature: float, margin: float) -> Tensor:
    """Returns the supervised contrastive loss of each anchor, (M,) float32.

    For anchor i: minus the mean over positives j of log(exp(s_ij / tau) / sum over k != i of exp(s_ik / tau)), where s is the
    cosine, and min(cosine + margin, 1) between positives.

    Args:
        features: (M, D); every label occurs twice at least.
        labels: (M,).

    Source: Khosla et al., arXiv 2004.11362, equation 2; the margin is ContrastiveFF's.
    """
    with full_precision(features):  # a temperature of .15 makes an error of bfloat16 in a cosine 7 times larger
        features = F.normalize(features.float(), dim=1)
        cosine = features @ features.T  # (M, M)
    same = labels[:, None] == labels
    s = torch.where(same, (cosine + margin).clamp(max=1), cosine) / temperature
    self_pair = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    log_share = s - s.masked_fill(self_pair, -torch.inf).logsumexp(1, keepdim=True)  # (M, M)
    positive = same & ~self_pair
    return -(log_share * positive).sum(1) / positive.sum(1)  # (M,)


@dataclass(frozen=True)
class ContrastiveForwardForward:
    """Every layer by a contrastive loss on two views, all layers at every step; then a linear read-out of the last.

    Block 0 of the loop is the first stage, which trains the layers; block 1 trains the read-out of the frozen layers.
    """

    num_layers: int
    seed: int

    def margin(self, layer: int) -> float:
        """Returns a layer's margin: from FIRST_MARGIN to LAST_MARGIN, linear in the layer."""
        return FIRST_MARGIN + (LAST_MARGIN - FIRST_MARGIN) * layer / max(self.num_layers - 1, 1)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per sample, (n,); see model.Objective.

        Args:
            batch: images of the first views, then of the second, (2n, C, H, W), and labels (n,).
        """
        views, labels = batch
        with autocast or nullcontext(), dropout_stream(self.seed, draw):
            if draw.block == 1:
                with frozen(*(modules[part_name(layer)] for layer in range(self.num_layers))):
                    features = self.features(modules, views[: len(labels)])  # (n, D)
                return F.cross_entropy(modules[READOUT](features).float(), labels, reduction="none")  # (n,)
            x, loss = views, torch.zeros(len(labels), device=labels.device)
            for layer in range(self.num_layers):
                x, _ = modules[part_name(layer)](x.detach())  # (2n, T, D)
                per_view = supervised_contrastive(x.mean(1), labels.repeat(2), TEMPERATURE, self.margin(layer))  # (2n,)
                loss = loss + per_view.unflatten(0, (2, -1)).mean(0)  # (n,)
        return loss

    def features(self, modules: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        """Returns the mean token after the last layer, (N, D)."""
        for layer in range(self.num_layers):
            x, _ = modules[part_name(layer)](x)  # (N, T, D)
        return x.mean(1)

    def predict(self, modules: Mapping[str, nn.Module], images: Tensor, inference: Inference, autocast: Autocast) -> Tensor:
        """Returns the read-out's logits, (1, N, classes)."""
        with autocast or nullcontext():
            return modules[READOUT](self.features(modules, images)).float()[None]


class TwoViews:
    """Batches with two augmentations of every image, for the stage that contrasts them: a data.Source made of two."""

    def __init__(self, first: Source, second: Source) -> None:
        self.first, self.second = first, second

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Returns images of the first views, then of the second, (2n, C, H, W), of the first alone for block 1, and labels."""
        x, labels = self.first.batch(block, step, batch_size, rows)
        if block == 0:
            x = torch.cat([x, self.second.batch(block, step, batch_size, rows)[0]])
        return x, labels

    def prefetch(self, block: int, step: int, batch_size: int) -> None:
        """Announces the step that comes next to the sources."""
        self.first.prefetch(block, step, batch_size)
        if block == 0:
            self.second.prefetch(block, step, batch_size)


def goodness(tokens: Tensor) -> Tensor:
    """Returns the mean square of the mean token, (N,) float32, of tokens (N, T, D)."""
    return tokens.float().mean(1).square().mean(1)


@dataclass(frozen=True)
class ForwardForward:
    """Every layer by softplus(threshold - goodness) with the right label as first token, and the reverse with a wrong one.

    Attributes:
        label_tokens: (classes, D).
    """

    num_layers: int
    label_tokens: Tensor
    seed: int

    def goodness_by_layer(self, modules: Mapping[str, nn.Module], images: Tensor, labels: Tensor) -> Tensor:
        """Returns each layer's goodness, (layers, N), from normalised, detached inputs."""
        x, found = images, []
        for layer in range(self.num_layers):
            if layer == 0:
                x, _ = modules[part_name(0)](images, self.label_tokens.to(images.device)[labels])  # (N, T, D)
            else:
                x, _ = modules[part_name(layer)](F.layer_norm(x.detach(), x.shape[-1:]))  # the length would tell the label
            found.append(goodness(x))
        return torch.stack(found)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss summed over layers, (n,); see model.Objective."""
        images, labels = batch
        classes = len(self.label_tokens)
        shift = torch.randint(1, classes, (draw.batch_size,), generator=generator(self.seed, "negative", draw.block, draw.step))
        wrong = (labels + shift[draw.rows].to(labels.device)) % classes
        with autocast or nullcontext(), dropout_stream(self.seed, draw):
            positive = self.goodness_by_layer(modules, images, labels)  # (layers, n)
            negative = self.goodness_by_layer(modules, images, wrong)
        return (F.softplus(THRESHOLD - positive) + F.softplus(negative - THRESHOLD)).sum(0)

    def predict(self, modules: Mapping[str, nn.Module], images: Tensor, inference: Inference, autocast: Autocast) -> Tensor:
        """Tries every label; returns the sum of goodness up to each layer, the first left out, (layers - 1, N, classes)."""
        found = []
        with autocast or nullcontext():
            for label in range(len(self.label_tokens)):
                found.append(self.goodness_by_layer(modules, images, torch.full((len(images),), label, device=images.device)))
        by_layer = torch.stack(found, dim=-1)  # (layers, N, classes)
        return by_layer[min(1, self.num_layers - 1) :].cumsum(0)


# ---------------------------------------------------------------------------------------------------------------------
# NoProp


class NoPropCNN(nn.Module):
    """NoProp's denoiser F(z_in, c_noise, images): a small convolutional network on the image, joined by the noisy embedding.

    Args:
        width: of the embedding.
        out_features: logits, or a velocity.
        hidden: width of the linear layers.
        timed: whether c_noise is an input; without it, batch norm follows the linear layers (discrete time).
    """

    def __init__(self, *, channels: int, size: int, width: int, out_features: int, hidden: int, timed: bool) -> None:
        super().__init__()

        def linear(inputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, hidden), *([] if timed else [nn.BatchNorm1d(hidden)]))

        convolutions = []
        for before, after in ((channels, 32), (32, 64), (64, 128)):
            convolutions += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
        self.image = nn.Sequential(*convolutions, nn.Flatten(), linear(128 * (size // 8) ** 2))
        self.embedding1, self.embedding2 = linear(width), linear(hidden)
        self.level = LevelEmbedding(hidden, num_features=64) if timed else None
        self.joint = nn.Sequential(linear(3 * hidden if timed else 2 * hidden), nn.ReLU(), linear(hidden), nn.ReLU())
        self.head = nn.Linear(hidden, out_features)
        initialize(self)

    def forward(self, z_in: Tensor, c_noise: Tensor | None, images: Tensor, skip: None = None) -> Tensor:
        """Returns (N, out_features) for z_in (N, D), c_noise (N,) and images (N, C, H, W)."""
        return self.join(z_in, c_noise, self.image(images))

    def join(self, z_in: Tensor, c_noise: Tensor | None, features: Tensor) -> Tensor:
        """Returns (N, out_features) from the image's features (N, hidden), which do not change from step to step."""
        h = self.embedding1(z_in).relu()  # (N, hidden)
        h = h + self.embedding2(h).relu()  # (N, hidden)
        inputs = [features, h] if self.level is None else [features, h, self.level(c_noise).relu()]
        return self.head(self.joint(torch.cat(inputs, dim=1)))  # (N, out)


def cosine_signal(steps: int) -> np.ndarray:
    """Returns abar_t for t = 0..steps, (steps + 1,) float64: the signal's share, from 0 (noise) to almost 1."""
    remaining = 1 - np.arange(steps + 1) / steps
    abar = np.cos((remaining + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2) ** 2
    abar[0] = 0.0
    return abar


def posterior_coefficients(abar_before: float, abar: float) -> tuple[float, float, float]:
    """Returns a, b, c of z_t = a u + b z_{t-1} + sqrt(c) eps, the exact posterior of z_t given z_{t-1} and the target u.

    z_t ~ N(sqrt(abar) u, 1 - abar), and z_{t-1} = sqrt(alpha) z_t + noise of variance 1 - alpha with alpha = abar_before / abar.
    """
    alpha = abar_before / abar
    rest = 1 - abar_before
    a = math.sqrt(abar) * (1 - alpha) / rest
    b = math.sqrt(alpha) * (1 - abar) / rest
    return a, b, (1 - abar) * (1 - alpha) / rest


def prior_divergence(u: Tensor, abar: Tensor | float) -> Tensor:
    """Returns KL(N(sqrt(abar) u, 1 - abar) || N(0, 1)), summed over dimensions: (N,) for u (N, D)."""
    variance = torch.as_tensor(1 - abar, device=u.device)
    return 0.5 * (abar * u.square() + variance - 1 - variance.log()).sum(1)


class MonotoneSchedule(nn.Module):
    """A learned decreasing gamma(t) = -ln SNR on [0, 1]: a line and sigmoids with positive weights between learned ends."""

    def __init__(self, num_sigmoids: int = 16, start: float = 7.0, span: float = 14.0) -> None:
        super().__init__()
        self.start, self.span = nn.Parameter(torch.tensor(start)), nn.Parameter(torch.tensor(span))
        self.line = nn.Parameter(torch.tensor(1.0))
        self.weights = nn.Parameter(torch.full((num_sigmoids,), -4.0))
        self.slopes = nn.Parameter(torch.full((num_sigmoids,), 8.0))
        self.centres = nn.Parameter(torch.linspace(0, 1, num_sigmoids))

    def _rise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns an increasing function of t and its derivative."""
        line, weights, slopes = (F.softplus(value) for value in (self.line, self.weights, self.slopes))
        s = torch.sigmoid(slopes * (t[..., None] - self.centres))  # (N, sigmoids)
        return line * t + s @ weights, line + (s * (1 - s) * slopes) @ weights

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gamma(t) and its derivative, shaped like t."""
        ends, _ = self._rise(torch.tensor([0.0, 1.0], device=t.device))
        value, slope = self._rise(t)
        scale = F.softplus(self.span) / (ends[1] - ends[0])
        return self.start - scale * (value - ends[0]), -scale * slope


class NoPropShared(nn.Module):
    """What NoProp trains with every block: the read-out, and where they are learned the embeddings and the schedule."""

    def __init__(self, width: int, num_classes: int, table: LearnedTable | None, learned_schedule: bool) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_classes)
        self.table = table
        self.schedule = MonotoneSchedule() if learned_schedule else None


@dataclass(frozen=True)
class NoProp:
    """NoProp in discrete time (dt: one network per step), continuous time (ct) and as flow matching (fm).

    Attributes:
        networks: T of dt.
        eta: weight of the denoising term.
        fixed: target embeddings (classes, D), or None where they are learned.
    """

    kind: str
    networks: int
    eta: float
    fixed: Tensor | None
    seed: int

    def table(self, modules: Mapping[str, nn.Module]) -> Tensor:
        """Returns the target embeddings, (classes, D)."""
        return modules[SHARED].table() if self.fixed is None else self.fixed.to(modules[SHARED].head.weight.device)

    def training_loss(self, modules: Mapping[str, nn.Module], batch: Batch, draw: Draw, autocast: Autocast) -> Tensor:
        """Returns the loss per sample, (n,); see model.Objective."""
        images, labels = batch
        table = self.table(modules)
        u = table[labels]  # (n, D)
        uniform, noise = (values[draw.rows] for values in draw_noise(u, draw, self.seed))
        last_draw = generator(self.seed, "noise_last", draw.block, draw.step, device=u.device)
        last_noise = torch.randn((draw.batch_size, u.shape[1]), device=u.device, generator=last_draw)[draw.rows]
        network, shared = modules[part_name(draw.block)], modules[SHARED]

        def run(z: Tensor, t: Tensor | None) -> Tensor:
            with autocast or nullcontext(), dropout_stream(self.seed, draw):
                return network(z, t, images).float()

        if self.kind == "fm":
            t = uniform.float()[:, None]
            z = t * u + (1 - t) * noise
            velocity = run(z, t[:, 0])  # (n, D)
            end = z + (1 - t) * velocity
            end = end.detach() if self.fixed is not None else end  # fixed targets: the read-out is no part of the loss
            return (velocity - (u - noise)).square().sum(1) + F.cross_entropy(shared.head(end), labels, reduction="none")

        if self.kind == "dt":
            signal = cosine_signal(self.networks)
            snr = signal / (1 - signal)
            before, last = torch.tensor(signal[draw.block]).float(), torch.tensor(signal[-1]).float()
            weight = self.networks * (snr[draw.block + 1] - snr[draw.block])
            t, prior = None, 0.0  # abar_0 is 0: nothing of the target is left, and KL(q(z_0|y) || p(z_0)) vanishes
        else:
            t = uniform.float()
            gamma, slope = shared.schedule(t)
            ends, _ = shared.schedule(torch.tensor([0.0, 1.0], device=t.device))
            before, last = torch.sigmoid(-gamma)[:, None], torch.sigmoid(-ends[1])
            weight = -slope * torch.exp(-gamma)  # SNR'(t)
            prior = prior_divergence(u, torch.sigmoid(-ends[0]))
        z = before.sqrt() * u + (1 - before).sqrt() * noise
        predicted = run(z, t).softmax(1) @ table  # (n, D)
        end = last.sqrt() * u + (1 - last).sqrt() * last_noise
        read_out = F.cross_entropy(shared.head(end), labels, reduction="none")
        return read_out + prior + 0.5 * self.eta * weight * (predicted - u).square().sum(1)

    def predict(self, modules: Mapping[str, nn.Module], images: Tensor, inference: Inference, autocast: Autocast) -> Tensor:
        """Returns the networks' logits after each step of dt, or after the last of ct, then the read-out's: (stages, N, classes).

        ct follows the deterministic path z = sqrt(abar) u + sqrt(1 - abar) eps with the predicted u and eps (the
        probability-flow ODE, integrated exactly while the prediction holds); fm takes Euler steps.
        """
        table, shared = self.table(modules), modules[SHARED]
        indices = range(inference.first, inference.first + len(images))
        draws = self.networks + 1 if self.kind == "dt" else 1
        noise = image_noise(inference.seed, indices, (draws, table.shape[1]), images.device)  # (N, draws, D)
        z, found = noise[:, 0], []

        def run(network: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
            with autocast or nullcontext():
                return network(*inputs).float()

        if self.kind == "dt":
            signal = cosine_signal(self.networks).tolist()
            for block in range(self.networks):
                a, b, c = posterior_coefficients(signal[block], signal[block + 1])
                found.append(run(modules[part_name(block)], z, None, images))
                z = a * found[-1].softmax(1) @ table + b * z + math.sqrt(c) * noise[:, block + 1]
            return torch.stack([*found, shared.head(z)])
        network = modules[part_name(0)]
        features = run(network.image, images)
        times = torch.linspace(0, 1, (inference.steps or ODE_STEPS) + 1, device=images.device)
        for t, following in zip(times[:-1], times[1:], strict=True):
            out = run(network.join, z, t.expand(len(z)), features)
            if self.kind == "fm":
                z = z + (following - t) * out
            else:
                now, then = (torch.sigmoid(-shared.schedule(time)[0]) for time in (t, following))
                u = out.softmax(1) @ table
                z = then.sqrt() * u + (1 - then).sqrt() * (z - now.sqrt() * u) / (1 - now).sqrt()
                found = [out]
        return torch.stack([*found, shared.head(z)])
