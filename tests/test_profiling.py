"""Counts against what autograd keeps, and predictions against both; no time is judged here."""

import csv
import json
import weakref

import pytest
import torch
from conftest import make_classifier, make_config
from test_text import text_config

import config as configuration
import kinds
import pipeline
import profiling
from config import SettingError
from hardware import Hardware
from model import build_module, saved_bytes

CPU = Hardware(torch.device("cpu"), "fp32", 1)


# A model of every kind; all can be cut into two blocks but the last.
CONFIGS = {
    "dit": make_config,
    "vit": make_classifier,
    "vit, shared": lambda **groups: make_classifier(model={"share": "ends"}, objective={"table": "learned"}, **groups),
    "concat": lambda **groups: text_config("concat", **groups),
    "inline": lambda **groups: text_config("inline", **groups),
    "masked": lambda **groups: text_config("masked", **groups),
    "next_token": lambda **groups: text_config("next_token", **groups),
}
every_kind = pytest.mark.parametrize("kind", CONFIGS)


def test_saved_bytes_of_a_known_graph():
    """An exponential keeps its result, once, though two products use it; parameters and views of them do not count."""
    weight = torch.ones(8, 4, requires_grad=True)
    x = torch.ones(2, 8)

    def loss():
        y = (x @ weight).exp()  # keeps x (64 bytes), weight (held), y (32 bytes)
        return (y * y).sum()

    assert saved_bytes(loss, [weight]) == 64 + 32


def test_what_was_counted_is_freed():
    """A result that its own operation keeps, as that of an exponential, does not hold itself for ever."""
    x, found = torch.ones(8, requires_grad=True), []

    def loss():
        y = x.exp()
        found.append(weakref.ref(y))
        return y.sum()

    saved_bytes(loss, [x])
    assert found[0]() is None


@every_kind
def test_counts_predict_what_is_measured(kind):
    """Bytes kept and operations are those of the layers plus those of embeddings and head, for every batch: exactly."""
    config = CONFIGS[kind]()
    size = config.train.batch_size
    for num_blocks in [b for b in profiling.cuts(config) if b <= 2]:
        cut = profiling.variant(config, num_blocks)
        counts, job = profiling.count(cut, CPU), profiling.make_job(cut, CPU)
        layer = counts.fixed[0] + size * counts.activations[0]
        for checkpointing in (False, True):
            job.set_checkpointing(checkpointing)
            measured = profiling.activation_bytes(job) + (layer if checkpointing else 0)
            assert measured == profiling.predicted_activations(counts, job.layers, size, checkpointing)
            assert profiling.operations(job) == profiling.predicted_operations(counts, job.layers, size, checkpointing)
        assert sum(p.numel() for p in job.parameters) == job.layers * counts.parameters[0] + counts.parameters[1]


@every_kind
def test_checkpointing_changes_no_gradient(kind):
    """To the bit, dropout included; the layers are moved from their start, where they pass their input on."""
    config = CONFIGS[kind](**({"model": {"dropout": 0.5}} if kind == "vit" else {}))
    job = profiling.make_job(config, CPU)
    torch.manual_seed(0)
    for parameter in job.parameters:
        torch.nn.init.normal_(parameter, std=0.2)
    gradients = []
    for checkpointing in (False, True):
        job.set_checkpointing(checkpointing)
        job.loss().backward()
        gradients.append([parameter.grad for parameter in job.parameters])
        for parameter in job.parameters:
            parameter.grad = None
    for kept, again in zip(*gradients, strict=True):
        assert (kept is None and again is None) or torch.equal(kept, again)
    assert sum(bool(gradient.any()) for gradient in gradients[0] if gradient is not None) > 10


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 6])
def test_a_block_keeps_its_share_of_the_activations(num_blocks):
    """At most 1.02/num_blocks of the end-to-end step's, plus what embeddings and head keep."""
    config = make_config(model={"depth": 12, "width": 64, "patch_size": 2})
    one = profiling.count(config, CPU)
    kept = {
        blocks: profiling.activation_bytes(profiling.make_job(profiling.variant(config, blocks), CPU))
        for blocks in (1, num_blocks)
    }
    ends = one.fixed[1] + config.train.batch_size * one.activations[1]
    assert kept[num_blocks] <= 1.02 / num_blocks * kept[1] + ends


@pytest.mark.parametrize("block", [0, 1, 2])
def test_what_a_step_holds_is_what_was_predicted(block):
    """Storages while the optimizer works; beyond the prediction is the step count that AdamW keeps of each parameter."""
    job = profiling.make_job(make_config(), CPU, block)
    held = profiling.held_bytes(job)
    counts = profiling.count(make_config(), CPU)
    assert job.block == block and held["parameters"] == held["gradients"] == held["ema"]
    assert sum(held.values()) == profiling.predicted_state(counts, 1) + 4 * len(list(job.part.module.parameters()))


@pytest.mark.parametrize(("num_blocks", "millions"), [(1, 457.82), (3, 155.59), (4, 117.81)])
def test_parameters_of_the_full_shape(num_blocks, millions):
    """DiT-L/2 on ImageNet's latents, without memory for it, against the arithmetic of its layers and ends."""
    width, patch, frequencies = 1024, 4 * 2**2, 256
    layer = (3 + 1 + 8 + 6) * width**2 + (3 + 1 + 5 + 6) * width  # qkv, projection, MLP, adaLN
    embeddings = (patch + 1) * width + (frequencies + 1) * width + (width + 1) * width + 1001 * width  # patch, level, label
    head = 2 * (width + 1) * width + (width + 1) * patch
    sizes = {"size": "L", "depth": 24, "width": width, "heads": 16, "patch_size": 2}
    data = {"size": 32, "channels": 4, "num_classes": 1000}
    method = {"name": "diffusion_blocks"}
    config = make_config(model=sizes, data=data, partition={"num_blocks": num_blocks}, method=method)
    with torch.device("meta"):
        module = build_module(config, "block_0")
    found = sum(parameter.numel() for parameter in module.parameters())
    assert found == 24 // num_blocks * layer + embeddings + head == pytest.approx(millions * 1e6, abs=5e3)
    one = profiling.Counts((layer, embeddings + head), *[(0, 0)] * 6)
    assert profiling.predicted_state(one, 24 // num_blocks) == 20 * found  # float32: four bytes of each, gradient, moments, EMA


def test_share_outside_is_a_share():
    job = profiling.make_job(make_config(), CPU)
    before = torch.Tensor.backward
    assert 0 < profiling.share_outside(job) < 1
    assert torch.Tensor.backward is before and job.part.step == 1


def test_sizes():
    assert profiling.parse_bytes("8GiB") == 8 * 2**30 and profiling.parse_bytes("1.5 gb") == 1_500_000_000
    for text in ("8", "GiB", "8 parsecs", "0MB", "-1GiB", f"{'9' * 400}GiB", f"{'9' * 308}GiB"):
        with pytest.raises(SettingError, match="memory="):
            profiling.parse_bytes(text)
    assert profiling.micro_batches(12) == [12, 6, 3, 2, 1]


def test_plan_says_what_fits(tmp_path, capsys):
    """Less memory leaves less: smaller micro-batches, then checkpointing, then offload alone, then nothing."""
    fitting = []
    for memory in ("100MiB", "450KiB", "250KiB"):
        config = make_config(mode="plan", memory=memory, folder=str(tmp_path / memory), train={"batch_size": 64})
        pipeline.run(config)
        rows = json.loads((tmp_path / memory / "plan.json").read_text())["rows"]
        assert all(row["fits"] == (row["bytes"] <= profiling.parse_bytes(memory)) for row in rows)
        fitting.append(sum(row["fits"] for row in rows))
    assert fitting[0] == len(rows) > fitting[1] > fitting[2] > 0
    assert "What fits 250KiB" in capsys.readouterr().out
    with pytest.raises(SettingError, match="memory=10KiB holds no cut of this model: the smallest needs"):
        pipeline.run(make_config(mode="plan", memory="10KiB", folder=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()
    with pytest.raises(SettingError, match="belong together"):
        make_config(mode="plan")


def test_a_profile_without_room_is_refused(tmp_path, monkeypatch):
    config = make_config(mode="profile", folder=str(tmp_path / "run"), train={"batch_size": 64})
    one = profiling.count(config, CPU)
    room = profiling.predicted_state(one, 3) + profiling.predicted_activations(one, 3, 20, False)
    monkeypatch.setattr(Hardware, "free_memory", lambda self: room)
    with pytest.raises(SettingError, match=r"MiB for 64 samples at once.*on cpu: set train.micro_batch=16"):
        pipeline.run(config)
    room = 1000
    with pytest.raises(SettingError, match="take a smaller model, or mode=plan"):
        pipeline.run(config)
    assert not (tmp_path / "run").exists()


@every_kind
def test_profile_writes_its_tables(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(profiling, "ROUNDS", 1)
    config = CONFIGS[kind]()
    config.mode, config.folder = "profile", str(tmp_path)
    pipeline.run(config)
    rows = json.loads((tmp_path / "profile.json").read_text())["rows"]
    cuts = profiling.cuts(config)
    assert [(row["num_blocks"], row["checkpointing"]) for row in rows] == [(b, c) for b in cuts for c in (False, True)]
    for row in rows:
        assert row["operations"] == row["predicted_operations"] > 0
        assert profiling.total_bytes(row) == pytest.approx(row["predicted_state_bytes"] + row["activations_bytes"], rel=0.02)
        assert row["activations_bytes"] == row["predicted_activations_bytes"]
        assert row["optimizer_bytes"] == pytest.approx(2 * row["parameters_bytes"], rel=0.02)
        assert row["sample_seconds"] > 0
    with open(tmp_path / "profile.csv") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert "appendix H" in capsys.readouterr().out


@every_kind
def test_plan_of_every_kind(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(profiling, "ROUNDS", 1)
    config = CONFIGS[kind]()
    config.mode, config.memory, config.folder = "plan", "1GiB", str(tmp_path)
    pipeline.run(config)
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert {row["num_blocks"] for row in rows} == set(profiling.cuts(config)) and all(row["fits"] for row in rows)
    # All blocks on the device: each part once, of which the gradients and activations of one step.
    for row in [row for row in rows if not row["offload"]]:
        cut = profiling.variant(config, row["num_blocks"])
        steps = [kinds.trained_parts(cut, block) for block in range(row["num_blocks"])]
        sizes = {name: sum(p.numel() for p in kinds.build_module(cut, name).parameters()) for names in steps for name in names}
        gradients = max(sum(sizes[name] for name in names) for names in steps)
        depth = max(configuration.layer_split(cut))
        activations = profiling.predicted_activations(profiling.count(cut, CPU), depth, row["micro_batch"], row["checkpointing"])
        assert row["bytes"] == 16 * sum(sizes.values()) + 4 * gradients + activations


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_kind
def test_no_step_waits_for_the_device(kind):
    job = profiling.make_job(CONFIGS[kind](), Hardware(torch.device("cuda"), "fp32", 1))
    job.step()  # in which kernels are loaded and memory is allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        job.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["profile", "plan"])
def test_what_has_no_equal_layers_is_refused(mode):
    settings = {"mode": mode, "memory": "1GiB" if mode == "plan" else None}
    with pytest.raises(SettingError, match=f"mode={mode} counts layers"):
        make_classifier(network="noprop_cnn", **settings)
    with pytest.raises(SettingError, match=f"mode={mode} compares end to end with blocks"):
        make_classifier("greedy", **settings)
