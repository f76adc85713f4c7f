"""Counts against what autograd keeps, and predictions against both; no time is judged here."""

import csv
import json

import pytest
import torch
from conftest import make_config

import generation
import pipeline
import profiling
from config import SettingError
from hardware import Hardware

CPU = Hardware(torch.device("cpu"), "fp32", 1)


@pytest.fixture(scope="module")
def counts():
    return profiling.count(make_config(), generation, CPU)


def test_saved_bytes_of_a_known_graph():
    """An exponential keeps its result, once, though two products use it; parameters and views of them do not count."""
    weight = torch.ones(8, 4, requires_grad=True)
    x = torch.ones(2, 8)

    def loss():
        y = (x @ weight).exp()  # keeps x (64 bytes), weight (held), y (32 bytes)
        return (y * y).sum()

    assert profiling.saved_bytes(loss, [weight]) == 64 + 32


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_follow_from_the_counts(counts, num_blocks, checkpointing):
    """What a step keeps is layers times one layer's plus what embeddings and head keep, for every batch: to the byte."""
    config = profiling.variant(make_config(), num_blocks, activation_checkpointing=checkpointing)
    job = profiling.make_job(config, generation, CPU)
    layer = counts.fixed[0] + 8 * counts.activations[0]
    measured = profiling.activation_bytes(job) + (layer if checkpointing else 0)
    assert measured == profiling.predicted_activations(counts, 3 // num_blocks, 8, checkpointing)


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 6])
def test_a_block_keeps_its_share_of_the_activations(num_blocks):
    """At most 1.02/num_blocks of the end-to-end step's, plus what embeddings and head keep."""
    config = make_config(model={"depth": 12, "width": 64, "patch_size": 2})
    one = profiling.count(config, generation, CPU)
    kept = {
        blocks: profiling.activation_bytes(profiling.make_job(profiling.variant(config, blocks), generation, CPU))
        for blocks in (1, num_blocks)
    }
    ends = one.fixed[1] + config.train.batch_size * one.activations[1]
    assert kept[num_blocks] <= 1.02 / num_blocks * kept[1] + ends


def test_operations_follow_from_the_counts(counts):
    job = profiling.make_job(profiling.variant(make_config(), 1), generation, CPU)
    assert profiling.operations(job) == profiling.predicted_operations(counts, 3, 8, False)
    job.part.module.checkpointing = True
    assert profiling.operations(job) == profiling.predicted_operations(counts, 3, 8, True)


def test_share_outside_is_a_share():
    job = profiling.make_job(make_config(), generation, CPU)
    before = torch.Tensor.backward
    assert 0 < profiling.share_outside(job) < 1
    assert torch.Tensor.backward is before and job.part.step == 1


def test_sizes():
    assert profiling.parse_bytes("8GiB") == 8 * 2**30 and profiling.parse_bytes("1.5 gb") == 1_500_000_000
    for text in ("8", "GiB", "8 parsecs", "0MB", "-1GiB"):
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


def test_profile_writes_its_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling, "ROUNDS", 1)
    pipeline.run(make_config(mode="profile", folder=str(tmp_path)))
    rows = json.loads((tmp_path / "profile.json").read_text())["rows"]
    assert [(row["num_blocks"], row["checkpointing"]) for row in rows] == [(b, c) for b in (1, 2, 3) for c in (False, True)]
    for row in rows:
        assert row["operations"] == row["predicted_operations"]
        assert row["activations_bytes"] == row["predicted_activations_bytes"]
        assert row["optimizer_bytes"] == pytest.approx(2 * row["parameters_bytes"], rel=0.02)
    with open(tmp_path / "profile.csv") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert "appendix H" in capsys.readouterr().out
