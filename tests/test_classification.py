"""Classification: the label's embedding as target, its bridge and weight, and what is known of a trained model."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, make_classifier, make_config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image
from test_train import only, state

import checkpoint
import classification
import config as configuration
import main  # registers the schemas
import pipeline
import train as training
from baselines import Inference
from classification import Classifier, label_information, label_scores, mean_cosine
from config import SCHEMAS, LatentsConfig, SettingError
from dblock_modules import LogNormalLevels, edm_weight, equal_shares, make_partition
from hardware import Hardware
from model import LearnedTable, OneResident, bridge, cross_entropy_weight, fixed_table, part_name

CPU = Hardware(torch.device("cpu"), "fp32", 1)


def random_classifier(config, images=True) -> Classifier:
    """A classifier whose blocks differ and whose outputs are not zero; or one that cannot see its images."""
    names = {
        name for block in range(configuration.trained_blocks(config)) for name in classification.trained_parts(config, block)
    }
    modules = {}
    for index, name in enumerate(sorted(names)):
        modules[name] = classification.build_module(config, name).eval()
        torch.manual_seed(index)
        for key, parameter in modules[name].named_parameters():
            torch.nn.init.normal_(parameter, std=0.2)
            if not images and "patches" in key:
                torch.nn.init.zeros_(parameter)
    return classification.build_model(config, modules, 0.5, CPU)


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    """A folder with a small trained and scored classifier of 3 blocks."""
    folder = tmp_path_factory.mktemp("trained")
    pipeline.run(fit_config(cache, folder))
    return folder


def fit_config(cache, folder, **groups):
    train = {"steps": 150, "batch_size": 32, "learning_rate": 3e-3, "schedule": "cosine", "evaluate_every": 225}
    data = {"cache": str(cache), "crop": 0}
    return make_classifier(data=data, model={"width": 32}, folder=str(folder), **{"train": train, **groups})


def results_of(folder):
    return {row["kind"]: row for row in json.loads((folder / "results.json").read_text())}


# ---------------------------------------------------------------------------------------------------------------------
# Targets, bridge, weight


def test_weight_is_per_sample_and_the_released_one_is_not():
    """With unequal levels: w_i CE_i, mean(CE) mean(w) by the broadcast of the released code, or CE_i."""
    sigma = torch.tensor([0.1, 0.3, 1.0, 5.0], dtype=torch.float64)
    loss = torch.tensor([0.2, 0.7, 1.5, 2.0])
    w = edm_weight(sigma, 0.125).float()
    assert torch.allclose(cross_entropy_weight("per_sample", sigma, 0.125) * loss, w * loss)
    released = (loss * w[:, None]).mean()  # (N,) by (N, 1) is (N, N)
    assert (cross_entropy_weight("batch_mean", sigma, 0.125) * loss).mean().item() == pytest.approx(released.item(), rel=1e-5)
    assert (cross_entropy_weight("per_sample", sigma, 0.125) * loss).mean().item() != pytest.approx(released.item(), rel=0.1)
    assert torch.equal(cross_entropy_weight("none", sigma, 0.125), torch.ones(4))


@pytest.mark.parametrize("weighting", ["none", "per_sample", "batch_mean"])
def test_rows_have_the_loss_of_the_whole(weighting):
    config = make_classifier(objective={"weighting": weighting})
    model = random_classifier(config)
    batch = torch.randn(8, 1, 8, 8), torch.arange(8)
    whole = model.objective.training_loss(model.modules, batch, training.Draw(1, 2, 8, slice(0, 8)), None)
    assert whole.shape == (8,) and whole.dtype == torch.float32
    for rows in (slice(0, 3), slice(3, 8)):
        part = tuple(values[rows] for values in batch)
        loss = model.objective.training_loss(model.modules, part, training.Draw(1, 2, 8, rows), None)
        assert torch.allclose(loss, whole[rows], rtol=1e-5)


@pytest.mark.parametrize(("name", "top_k"), [("soft", 1), ("hard", 1), ("top_k", 1), ("top_k", 3), ("top_k", 50)])
def test_bridge_of_a_certain_prediction_is_the_target(name, top_k):
    table = fixed_table(10, 16, 0, normalize=True)
    labels = torch.tensor([3, 0, 9])
    assert torch.equal(bridge(1e4 * F.one_hot(labels, 10).float(), table, name, top_k), table[labels])


def test_bridges_between_soft_and_hard():
    table = fixed_table(10, 16, 0, normalize=True)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(bridge(logits, table, "soft", 1), logits.softmax(1) @ table)
    assert torch.equal(bridge(logits, table, "top_k", 10), bridge(logits, table, "soft", 1))
    assert torch.allclose(bridge(logits, table, "top_k", 1), bridge(logits, table, "hard", 1))
    two = logits[0].topk(2)
    expected = two.values.softmax(0) @ table[two.indices]
    assert torch.allclose(bridge(logits[:1], table, "top_k", 2)[0], expected, atol=1e-6)


def test_tables():
    fixed = fixed_table(10, 64, 0, normalize=True)
    assert torch.allclose(fixed.norm(dim=1), torch.ones(10)) and torch.equal(fixed, fixed_table(10, 64, 0, normalize=True))
    assert not torch.equal(fixed, fixed_table(10, 64, 1, normalize=True))
    raw = fixed_table(1000, 64, 0, normalize=False)
    assert raw.norm(dim=1).mean().item() == pytest.approx(1, abs=0.02) and raw.norm(dim=1).std() > 0.05
    learned = LearnedTable(10, 64, 0, normalize=True)
    assert torch.allclose(learned(), fixed, atol=1e-6)
    assert torch.equal(LearnedTable(10, 64, 0, normalize=False)(), learned.weight)


def test_collapse_is_seen():
    assert mean_cosine(torch.eye(5)) == pytest.approx(0)
    assert mean_cosine(torch.ones(5, 3)) == pytest.approx(1)
    assert mean_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("blocks", "shares"), [(3, [0.404, 0.593, 0.003]), (4, [None, None, None, 0.0])])
def test_information_of_the_embedding_alone(blocks, shares):
    """facts.md: what the noisy unit-norm embedding of 100 classes leaves to each block of EDM's levels."""
    table = fixed_table(100, 128, 0, normalize=True)
    edges = make_partition("equi_probability", blocks, LogNormalLevels()).edges
    nats = [label_information(table, edge, seed=0) / math.log(100) for edge in edges]
    found = np.diff(nats)
    assert nats[0] == pytest.approx(0, abs=0.002) and nats[-1] == pytest.approx(1, abs=1e-6)
    for share, expected in zip(found, shares, strict=True):
        assert expected is None or share == pytest.approx(expected, abs=0.012)


def test_equal_shares():
    edges = [0.1, 1.0, 10.0, 100.0]
    assert equal_shares(edges, [1, 1, 2], 2) == pytest.approx([100, 10, 0.1])
    assert equal_shares(edges, [0, 4, 0], 2) == pytest.approx([100, 10**0.5, 0.1])


def test_scores_by_hand():
    logits = torch.tensor([[2.0, 1.0, 0, 0, 0, 0], [1.0, 2.0, 0, 0, 0, -1.0], [0, 1, 2, 3, 4, -1.0]])
    scores = label_scores(logits, torch.tensor([0, 0, 5]))
    assert scores["accuracy"] == pytest.approx(1 / 3) and scores["top5"] == pytest.approx(2 / 3)
    assert scores["cross_entropy"] == pytest.approx(-logits.log_softmax(1)[[0, 1, 2], [0, 0, 5]].mean().item(), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Prediction


def test_each_step_runs_the_block_that_owns_its_level():
    config = make_classifier()
    model = random_classifier(config)
    calls = []
    for name, module in model.modules.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: calls.append(name))
    x = torch.randn(5, 1, 8, 8)
    assert model.stages(x).shape == (3, 5, 10) and calls == ["block_0", "block_1", "block_2"]
    calls.clear()
    assert model.stages(x, steps=6).shape == (6, 5, 10)
    assert calls == ["block_0", "block_0", "block_1", "block_1", "block_2", "block_2"]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_certain_blocks_hand_on_the_target(noise):
    """Where every block is sure of the label, each Euler step lands on the embedding plus what is left of the noise."""
    config = make_classifier(partition={"overlap": 0.0})
    objective = classification.build_objective(config)
    seen = []

    class Sure:
        def __call__(self, z_in, c_noise, images, skip):
            sigma = (4 * c_noise[:, None]).exp()
            seen.append((z_in * (sigma**2 + objective.sigma_data**2).sqrt(), sigma))
            return 1e4 * F.one_hot(torch.full((len(z_in),), 7), 10).float()

    modules = {part_name(block): Sure() for block in range(3)}
    logits = objective.predict(modules, torch.zeros(4, 1, 8, 8), Inference(None, "per_block", noise, "soft", 5, 0), None)
    assert logits.argmax(-1).tolist() == [[7] * 4] * 3
    start = seen[0][0] / seen[0][1]
    for z, sigma in seen[1:]:
        left = start - objective.fixed[7] / objective.distribution.maximum  # z_0 = sigma_max eps, so eps - y / sigma_max
        assert torch.allclose(z, objective.fixed[7] + sigma * left, atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_every_test_image_is_scored_at_any_batch(cache, noise):
    config = make_classifier(data={"cache": str(cache)}, eval={"initial_noise": noise})
    data, model = classification.load(config), random_classifier(config)
    whole = classification.logits_of_test_split(data, model, None, 360)
    by_seven = classification.logits_of_test_split(data, model, None, 7)
    assert whole.shape == by_seven.shape == (3, 360, 10)
    assert torch.allclose(whole, by_seven, atol=1e-4)


def test_released_predictions_walk_over_raw_rows():
    config = make_classifier(objective={"table": "learned"}, eval={"bridge": "raw"})
    model = random_classifier(config)
    raw = model.stages(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    model.config.eval.bridge = "soft"
    soft = model.stages(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(raw[0], soft[0]) and not torch.allclose(raw[1], soft[1])


@pytest.mark.parametrize(("label_token", "tokens"), [("beside", 6), ("instead", 5)])
def test_where_the_noisy_label_stands(label_token, tokens):
    config = make_classifier(model={"label_token": label_token})
    model = random_classifier(config)
    lengths = []
    model.modules["block_0"].layers[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    logits = model.stages(torch.randn(2, 1, 8, 8))
    assert lengths == [tokens] and torch.isfinite(logits).all()


def test_prediction_in_five_lines(trained, cache, tmp_path, monkeypatch):
    """The lines of the README, as they stand there."""
    text = (ROOT / "README.md").read_text().split("<!-- five lines: classification -->")[1]
    snippet = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in snippet.splitlines() if line]) == 5
    test = classification.load(make_classifier(data={"cache": str(cache)})).test
    Image.fromarray(test.images[3, 0]).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(snippet.replace("runs/RUN", str(trained)), names)
    assert names["probabilities"].shape == (1, 10) and names["probabilities"].sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.allclose(names["probabilities"], names["model"].predict(test.images[3:4]))
    assert names["model"].predict(Image.new("RGB", (30, 20))).shape == (1, 10)
    with pytest.raises(SettingError, match="uint8"):
        names["model"].predict(torch.zeros(1, 1, 8, 8))


# ---------------------------------------------------------------------------------------------------------------------
# Training


def test_it_learns_and_knows_itself(trained):
    results = results_of(trained)
    scores, stages = results["classification"]["scores"], results["classification"]["stages"]
    assert scores["accuracy"] > 0.6 and scores["top5"] > 0.9 and scores["shuffled_accuracy"] < 0.25
    assert [row["block"] for row in stages] == [0, 1, 2] and scores["cross_entropy_at_sigma_max"] == stages[0]["cross_entropy"]
    denoising = results["label_denoising"]
    assert sum(row["nats"] for row in denoising["blocks"]) == pytest.approx(math.log(10), abs=0.05)
    for row in denoising["blocks"]:
        assert row["cross_entropy"] < row["cross_entropy_of_embedding_alone"] + 0.3
    assert not denoising["blocks"][0]["ignores_image"]
    curve = training.read_metrics(trained / "heldout.jsonl")
    assert [row["step"] for row in curve] == [225, 450] and curve[0]["cross_entropy"] > curve[1]["cross_entropy"]
    assert (trained / "plots" / "loss_by_level.png").stat().st_size > 1000


def test_blind_blocks_are_reported(cache, tmp_path, capsys):
    config = make_classifier(data={"cache": str(cache)})
    data = classification.load(config)
    result = classification.denoising_result(config, data, random_classifier(config, images=False), tmp_path)
    assert [row["ignores_image"] for row in result["blocks"]] == [True] * 3
    assert result["notes"] == [f"block {block} ignores the image" for block in range(3)]
    assert "block 1 ignores the image" in capsys.readouterr().out


def test_edges_from_a_pilot(trained, cache):
    config = fit_config(cache, "unused", partition={"name": "cross_entropy", "pilot": str(trained), "num_blocks": 2})
    assert config.partition.name == "custom" and config.partition.pilot is None
    high, inner, low = config.partition.edges
    assert (high, low) == (5.0, 0.1) and low < inner < high
    assert len(configuration.partition(config).edges) == 3
    cut = {"name": "cross_entropy", "pilot": str(trained), "num_blocks": 2}
    with pytest.raises(SettingError, match="levels"):
        fit_config(cache, "unused", partition=cut, objective={"sigma_max": 7.0})


@pytest.mark.parametrize("content", ["{not json", "7", '[{"title": "x"}]', '[{"kind": "label_denoising"}]'])
def test_a_pilot_with_damaged_results_is_refused(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(SettingError, match="results.json is not a list of results"):
        make_classifier(partition={"name": "cross_entropy", "pilot": str(tmp_path)})


def test_blocks_train_apart_to_the_bit(cache, tmp_path):
    """With a fixed table, a job that owns one block gives the bits of the job that owns all."""
    settings = {"data": {"cache": str(cache)}, "mode": "train"}
    pipeline.run(make_classifier(folder=str(tmp_path / "all"), **settings))
    pipeline.run(make_classifier(folder=str(tmp_path / "one"), train={"blocks": [1]}, **settings))
    assert state(tmp_path / "one") == only(state(tmp_path / "all"), 1)


@pytest.mark.parametrize("groups", [{"objective": {"table": "learned"}}, {"model": {"share": "ends", "adaLN": "released"}}])
def test_a_step_moves_its_block_and_what_is_shared(groups):
    config = make_classifier(**groups)
    model = random_classifier(config)
    batch = torch.randn(8, 1, 8, 8), torch.arange(8)
    for block in (0, 2):
        for parameter in model.modules[part_name(block)].parameters():
            parameter.data.fill_(float("nan"))
    loss = model.objective.training_loss(model.modules, batch, training.Draw(1, 0, 8, slice(0, 8)), None)
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    moved = {name for name, module in model.modules.items() if any(p.grad is not None for p in module.parameters())}
    assert moved == {"block_1", "shared"} == set(classification.trained_parts(config, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("share", ["nothing", "ends"])
def test_one_resident_part_predicts_what_all_do(share):
    config = make_classifier(model={"share": share})
    names = sorted({name for block in range(3) for name in classification.trained_parts(config, block)})
    all_of_them = {name: classification.build_module(config, name).eval() for name in names}
    for index, module in enumerate(all_of_them.values()):
        for parameter in module.parameters():
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    cpu, images = Hardware(torch.device("cpu"), "fp32", 1), torch.randn(5, 1, 8, 8)
    one = OneResident(names, all_of_them.__getitem__)
    whole, apart = (classification.build_model(config, modules, 1.0, cpu).stages(images) for modules in (all_of_them, one))
    assert torch.equal(whole, apart) and whole.std() > 0 and len(one.held) == 1


REFUSED = [
    ("num_classes", {"data": {"num_classes": 1}}),
    ("patch_size=3 does not divide", {"model": {"patch_size": 3}}),
    ("table=learned needs all blocks", {"objective": {"table": "learned"}, "train": {"blocks": [0]}}),
    ("share=ends needs all blocks", {"model": {"share": "ends"}, "train": {"blocks": [0]}}),
    ("greedy needs all blocks", {"method": "greedy", "train": {"blocks": [0]}}),
    ("noprop_cnn", {"method": "noprop_dt"}),
    ("ViT's layers", {"method": "greedy", "network": "cnn"}),
    ("micro_batch", {"method": "forward_forward", "train": {"micro_batch": 4}}),
    ("method.name=shallow", {"method": "shallow"}),
    ("objective.weighting", {"objective": {"weighting": "edm"}}),
    ("objective.table", {"objective": {"table": "random"}}),
    ("model.label_token", {"model": {"label_token": "behind"}}),
    ("model.adaLN", {"model": {"adaLN": "zero"}}),
    ("sigma_max", {"objective": {"sigma_max": 0.01}}),
    ("partition.pilot", {"partition": {"name": "cross_entropy"}}),
    ("mlp_ratio=0.01 leaves", {"model": {"mlp_ratio": 0.01}}),
    ("mlp_ratio=inf must", {"model": {"mlp_ratio": math.inf}}),
    ("model.width=4: model.adaLN", {"model": {"width": 4, "heads": 1, "adaLN": "released"}}),
    ("objective.eta=-1", {"method": "noprop_ct", "network": "cnn", "objective": {"eta": -1.0}}),
    ("objective.eta=nan", {"method": "noprop_dt", "network": "cnn", "objective": {"eta": math.nan}}),
    ("batch_size=1: the samples", {"method": "noprop_dt", "network": "cnn", "train": {"batch_size": 1}}),
    ("batch_size=1: the samples", {"method": "forward_forward", "train": {"batch_size": 1}}),
    ("results.json is missing", {"partition": {"name": "cross_entropy", "pilot": "nowhere"}}),
    ("eval.bridge", {"eval": {"bridge": "middle"}}),
    ("eval.label_steps", {"eval": {"label_steps": [0]}}),
    ("eval.initial_noise", {"eval": {"initial_noise": -1.0}}),
    ("data.crop", {"data": {"crop": 8}}),
    ("compile", {"model": {"share": "ends"}, "train": {"compile": True}}),
    ("train.parallel", {"method": "greedy", "train": {"parallel": "blocks"}}),
    ("train.parallel", {"objective": {"table": "learned"}, "train": {"parallel": "data"}}),
    ("mode=evaluate", {"mode": "sample"}),
    ("train.init_from", {"train": {"init_from": "runs/other"}}),
    ("depth=1 must be", {"method": "forward_forward", "model": {"depth": 1}}),
    ("objective=labels", {"objective": {"name": "edm"}}),
    ("train.offload=true leaves one block", {"method": "greedy", "train": {"offload": True}}),
    ("sampler.resident=one is not there", {"sampler": {"resident": "one"}}),
    ("num_blocks", {"partition": {"num_blocks": 4}}),
]


@pytest.mark.parametrize(
    ("message", "groups"), REFUSED, ids=[f"{number}_{message}" for number, (message, _) in enumerate(REFUSED)]
)
def test_refused_in_a_sentence(message, groups):
    with pytest.raises(SettingError, match=message) as caught:
        make_classifier(**groups)
    assert "\n" not in str(caught.value)


def test_data_that_do_not_fit(cache, monkeypatch):
    with pytest.raises(SettingError, match="num_classes=5: the data have 10"):
        classification.load(make_classifier(data={"num_classes": 5, "cache": str(cache)}))
    config = make_classifier(data={"cache": str(cache)})
    latents = LatentsConfig("imagenet256_latents", vae="vae", image_size=16, size=8, channels=4, num_classes=10)
    with pytest.raises(SettingError, match="classifies images: data=imagenet256_latents is not for it"):
        configuration.resolve(dataclasses.replace(config, data=latents))
    data = classification.load(config)
    one = dataclasses.replace(data, train=type(data.train)(data.train.images, np.zeros_like(data.train.labels)))
    monkeypatch.setattr(classification.data_sets, "load_images", lambda **_: one)
    with pytest.raises(SettingError, match="one label"):
        classification.load(config)
    with pytest.raises(SettingError, match="data.crop and data.randaugment are for classifiers"):
        make_config(data={"crop": 1})
    with pytest.raises(SettingError, match="partition.pilot"):
        make_config(partition={"pilot": "runs/pilot"})


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("diffusion_blocks", "sampler.guidance=2"),
        ("diffusion_blocks", "eval.features=null"),
        ("diffusion_blocks", "objective.eta=1"),
        ("diffusion_blocks", "train.label_dropout=0.1"),
        ("end_to_end", "objective.table=learned"),
        ("greedy", "partition.overlap=0.1"),
        ("local", "eval.bridge=hard"),
        ("forward_forward", "partition.num_blocks=3"),
        ("noprop_dt", "objective.sigma_max=5"),
    ],
)
def test_typed_keys_that_could_only_be_ignored(method, key):
    config = make_classifier(method, "cnn" if method.startswith("noprop") else "vit")
    with pytest.raises(SettingError, match=re.escape(key.partition("=")[0])):
        configuration.check_typed(config, [key])
    configuration.check_typed(config, ["train.steps=3", "sampler.weights=raw", "eval.seed=1", "seed=2"])


def test_keys_without_meaning_do_not_split_runs():
    one, two = (make_classifier("end_to_end", objective={"sigma_max": value}) for value in (5.0, 7.0))
    assert configuration.run_folder(one) == configuration.run_folder(two)


# ---------------------------------------------------------------------------------------------------------------------
# Overlays


@pytest.mark.parametrize("scale", ["vit_digits", "vit_fashion", "cifar100", "tiny_imagenet"])
@pytest.mark.parametrize("experiment", ["classification", "target_table", "noprop", "speed"])
def test_overlays_compose_at_every_scale(experiment, scale):
    assert {name for _, name, _ in SCHEMAS} >= {"vit", "label_schema"} and main.store is not None
    methods = ["noprop_dt", "diffusion_blocks"] if experiment == "noprop" else ["end_to_end", "diffusion_blocks", "greedy"]
    with initialize_config_dir(str(Path(ROOT) / "configs"), version_base="1.3"):
        for method in methods:
            composed = compose(
                "config", [f"experiment={experiment}", f"scale={scale}", f"method={method}", "data.path=somewhere"]
            )
            config = configuration.resolve(OmegaConf.to_object(composed))
            assert config.method.name == method and config.model.name == ("noprop_cnn" if experiment == "noprop" else "vit")
            names = classification.trained_parts(config, 0)
            assert all(sum(p.numel() for p in classification.build_module(config, name).parameters()) for name in names)


def test_released_preset_runs(cache, tmp_path):
    with initialize_config_dir(str(Path(ROOT) / "configs"), version_base="1.3"):
        small = ["model.depth=3", "train.steps=3", "train.batch_size=8", "train.precision=fp32", "threads=1", "device=cpu"]
        small += ["log.progress=false", f"data.cache={cache}", f"folder={tmp_path}", "eval.loss_levels=4", "eval.loss_images=20"]
        composed = compose("config", ["experiment=classification", "preset=released", *small])
    config = configuration.resolve(OmegaConf.to_object(composed))
    pipeline.run(config)
    assert set(checkpoint.read_run(tmp_path)["parts"]) == {"block_0", "block_1", "block_2", "shared"}
    assert results_of(tmp_path)["classification"]["protocol"]["sampler"]["bridge"] == "raw"
