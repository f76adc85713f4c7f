"""Latents, on a tiny autoencoder with random weights: the real path from images to scores, and bytes that survive a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, command_line, make_config
from PIL import Image

import config as configuration
import evaluation
import image_sets
import latents
import pipeline
import sampler
from checkpoint import load_model
from config import LatentsConfig, SettingError
from data import step_indices
from parallel import ALONE, World
from randomness import generator

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(images_and_vaes):
    return images_and_vaes


def settings(folder, cache="cache", **changes):
    given = {"path": str(folder / "images"), "vae": str(folder / "vae"), "cache": str(folder / cache), **changes}
    sizes = {"image_size": 16, "size": 8, "channels": 4, "num_classes": 2, "batch_size": 4, "shard_size": 8, "flip": True}
    return LatentsConfig("imagenet256_latents", **{**sizes, **given})


def encode(chosen, world=ALONE):
    latents.shard_folder(chosen).mkdir(parents=True, exist_ok=True)
    latents.encode(chosen, CPU, world, progress=False)
    return latents.shard_folder(chosen)


def contents(folder):
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".npy", ".json", ".part")}
    found.pop("verified.json", None)  # says when files were compared
    return found


@pytest.fixture(scope="module")
def encoded(folder):
    """The settings of an encoded set."""
    encode(settings(folder))
    return settings(folder)


def test_shards_hold_the_posteriors_of_images_and_of_mirror_images(folder, encoded):
    data = latents.load(encoded, sigma_data=0.5)
    assert data.train.images.shape == (26, 2, 2, 4, 8, 8) and data.test.images.shape == (12, 2, 2, 4, 8, 8)
    assert data.train.labels.tolist() == [0] * 13 + [1] * 13
    vae = latents.load_vae(encoded.vae, CPU)
    file = sorted((folder / "images" / "train" / "dog").iterdir())[2]  # "10.png", "11.png", "12.png" come after "1.png"
    image = np.asarray(image_sets.crop(Image.open(file), 16)).transpose(2, 0, 1)
    x = torch.from_numpy(image.copy())[None].float() / 127.5 - 1
    for view, picture in enumerate((x, x.flip(-1))):
        posterior = vae.encode(picture).latent_dist
        stored = torch.from_numpy(data.train.images[np.array([15])][0, view]).float()
        assert torch.allclose(stored[0], posterior.mean[0], rtol=2e-3, atol=1e-5)
        assert torch.allclose(stored[1], posterior.std[0], rtol=2e-3, atol=1e-5)
    pair = torch.from_numpy(data.train.images[:1][0, :, 0]).float()
    assert not torch.allclose(pair[0].flip(-1), pair[1], rtol=1e-2)  # a mirrored latent is no mirror image's latent


def test_latents_have_the_deviation_that_training_wants(encoded, capsys):
    data = latents.load(encoded, sigma_data=0.5)
    info = json.loads((latents.shard_folder(encoded) / "latents.json").read_text())
    assert f"standard deviation is {info['std']:.4f}" in capsys.readouterr().out
    assert info["vae_scale"] == 0.7 and data.factor == pytest.approx(0.5 / info["std"] * 0.7)
    both = torch.from_numpy(data.train.images[:]).flatten(0, 1)  # (52, 2, C, H, W)
    draws = torch.stack([data.draw(both, torch.randn(both[:, 0].shape)) for _ in range(50)])
    assert float(draws.std()) == pytest.approx(0.5, rel=0.01)


def test_batches_draw_from_the_posterior_of_either_view(encoded):
    data = latents.load(encoded, sigma_data=0.5)
    source = latents.LatentSource(data, CPU, seed=3)
    whole, labels = source.batch(1, 2, 12)
    indices = step_indices(3, 1, 2, 12, 26)
    assert labels.tolist() == data.train.labels[indices].tolist()
    noise = torch.randn((12, 4, 8, 8), generator=generator(3, "posterior", 1, 2))
    views = [data.draw(torch.from_numpy(data.train.images[indices][:, view]), noise) for view in (0, 1)]
    matches = torch.stack([(whole == view).flatten(1).all(1) for view in views])  # (2, 12)
    assert matches.any(0).all() and matches.any(1).all()
    source.prefetch(1, 2, 12)
    parts = [source.batch(1, 2, 12, slice(start, start + 4))[0] for start in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)
    straight = latents.LatentSource(latents.load(settings(encoded_root(encoded), flip=False), sigma_data=0.5), CPU, seed=3)
    assert torch.equal(straight.batch(1, 2, 12)[0], views[0])
    assert not torch.equal(source.batch(1, 3, 12)[0], whole)


def encoded_root(chosen):
    return latents.shard_folder(chosen).parent.parent


class Lone(World):
    """One of several processes that waits for none of them."""

    def wait(self):
        pass

    def _refused(self, by_this=False):
        return by_this


def test_processes_divide_the_shards_without_changing_a_byte(folder, encoded):
    """Two processes one after the other; the first one finishes."""
    chosen = settings(folder, "divided")
    encode(chosen, Lone(1, 2))
    assert not (latents.shard_folder(chosen) / "latents.json").exists()
    assert 0 < len(list(latents.shard_folder(chosen).glob("t*_0*.npy"))) < 6
    encode(chosen, Lone(0, 2))
    assert contents(latents.shard_folder(chosen)) == contents(latents.shard_folder(encoded))


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_an_encoder_that_is_cut_off_goes_on_to_the_same_bytes(folder, encoded, monkeypatch, at):
    """Cut off within batch `at`, with half of a batch in the file: only whole batches count."""
    chosen = settings(folder, f"cut_{at}")
    original, made = latents.encode_batch, []

    def cut_off(vae, images):
        if len(made) == at:
            part = next(latents.shard_folder(chosen).glob("*.part"), None)
            if part is not None:
                with open(part, "ab") as file:
                    file.write(b"half a batch")
            raise KeyboardInterrupt
        made.append(1)
        return original(vae, images)

    monkeypatch.setattr(latents, "encode_batch", cut_off)
    with pytest.raises(KeyboardInterrupt):
        encode(chosen)
    assert not (latents.shard_folder(chosen) / "latents.json").exists()
    monkeypatch.setattr(latents, "encode_batch", lambda vae, images: made.append(1) or original(vae, images))
    encode(chosen)
    assert len(made) == 10  # no batch twice
    assert contents(latents.shard_folder(chosen)) == contents(latents.shard_folder(encoded))


def test_an_encoder_killed_from_outside_goes_on_to_the_same_bytes(folder, encoded, tmp_path):
    """SIGKILL at whatever moment it finds the process in; the same command goes on."""
    overrides = ["mode=encode", "data=imagenet256_latents", f"data.path={folder / 'images'}", f"data.vae={folder / 'vae'}"]
    overrides += ["data.image_size=16", "data.size=8", "data.num_classes=2", "data.batch_size=4", "data.shard_size=8"]
    overrides += [f"data.cache={tmp_path}"]
    arguments = [sys.executable, str(ROOT / "main.py"), "threads=1", "log.progress=false", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shards = tmp_path / "imagenet256_latents"
    deadline = time.time() + 120
    while not list(shards.glob("*.part")) and time.time() < deadline and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    command_line(*overrides, cwd=tmp_path)
    assert contents(shards) == contents(latents.shard_folder(encoded))


def test_from_images_to_scores(folder, encoded, inception_weights, tmp_path, monkeypatch):
    """Encoded latents are trained on, sampled, decoded and scored; the references are computed once and kept by name."""
    monkeypatch.setattr(evaluation, "INCEPTION_SHA256", evaluation.checksum(inception_weights))
    monkeypatch.setattr(evaluation, "REFERENCE_FEATURES", 10)  # the test split is a large one
    monkeypatch.setattr(evaluation, "REFERENCE_CHUNK", 5)
    config = configuration.Config(
        data=encoded,
        model=configuration.ModelConfig("dit", "digits", patch_size=4, depth=3, width=16, heads=2),
        objective=configuration.ObjectiveConfig(),
        method=configuration.MethodConfig("diffusion_blocks"),
        partition=configuration.PartitionConfig("equi_probability"),
        train=configuration.TrainConfig(steps=3, batch_size=8, precision="fp32", sample_every=9),
        sampler=configuration.SamplerConfig(steps=3, schedule="per_block", num_images=10, batch_size=5),
        eval=configuration.EvalConfig(
            loss_levels=4, loss_images=8, features="inception-v3-compat", inception_weights=str(inception_weights)
        ),
        log=configuration.LogConfig(progress=False),
        out=str(tmp_path),
    )
    run = pipeline.run(configuration.resolve(config))
    results = json.loads((run / "results.json").read_text())
    assert [result["kind"] for result in results] == ["heldout_loss", "samples", "floor"]
    assert 0 < results[0]["scores"]["integrated"] < 10
    protocol = results[1]["protocol"]
    assert protocol["num_reference"] == 12 and protocol["num_reference_features"] == 10
    assert np.isfinite(results[1]["scores"]["frechet_inception_distance"]["value"])

    images, labels = sampler.load_arrays(next(run.glob("samples/*/samples.npz")))
    assert images.shape == (10, 3, 16, 16) and images.dtype == np.uint8 and labels.tolist() == [0, 1] * 5
    model = load_model(run)
    x = model.objective.sigma_data * torch.randn(5, 4, 8, 8)
    vae = latents.load_vae(encoded.vae, CPU)
    decoded = latents.decode(x, model.scale, encoded)
    with torch.no_grad():
        expected = (vae.decode(x[4:] / model.scale / 0.7).sample + 1) * 127.5
    assert (decoded[4:].float() - expected.clamp(0, 255)).abs().max() <= 0.51

    kept = list((latents.shard_folder(encoded) / "statistics").glob("*.npz"))
    assert len(kept) == 1 and kept[0].name.startswith("test_inception-v3-compat_")
    with np.load(kept[0]) as file:
        split = latents.load(encoded, 0.5).pixels.test
        features = evaluation._extractor("any", (3, 16, 16), "inception-v3-compat", inception_weights)(split.images, 5, CPU)[
            "2048"
        ].numpy()
        assert np.allclose(file["mu"], features.mean(0), atol=1e-5)
        assert np.allclose(file["sigma"], np.cov(features, rowvar=False), atol=1e-5)
    evaluation._references.clear()
    monkeypatch.setattr(evaluation, "_compute_reference", None)
    again = pipeline.run(configuration.resolve(config))
    assert json.loads((again / "results.json").read_text())[1]["scores"] == results[1]["scores"]


def test_what_does_not_fit_is_refused(folder, encoded, monkeypatch):
    def refuses(match, work, **changes):
        with pytest.raises(SettingError, match=match):
            work(settings(folder, **changes))

    refuses("other_vae", latents.read_info, vae=str(folder / "other_vae"))
    refuses("image_size", latents.read_info, image_size=32)
    refuses("num_classes=3", latents.read_info, num_classes=3)
    refuses("run mode=encode", latents.read_info, cache="nowhere")
    refuses("holds other latents", encode, vae=str(folder / "other_vae"))
    refuses("holds other latents", encode, batch_size=2)
    refuses(r"latents of \[4, 8, 8\]", encode, cache="new", size=4)
    refuses("cannot be loaded", encode, cache="new", vae=str(folder / "images"))
    refuses("data.path", latents.check_encode, path=str(folder / "nothing" / "here" / "now"))
    with pytest.raises(SettingError, match="data.path"):
        latents.check(settings(folder, path=str(folder / "no" / "such" / "images")), decodes=False, scores=True)
    os.rename(folder / "vae", folder / "kept_vae")
    latents.load_vae.cache_clear()
    try:
        (folder / "vae").symlink_to(folder / "other_vae")
        with pytest.raises(SettingError, match="other weights"):
            latents.check(encoded, decodes=True, scores=False)
        latents.check(encoded, decodes=False, scores=False)
    finally:
        (folder / "vae").unlink()
        os.rename(folder / "kept_vae", folder / "vae")
        latents.load_vae.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refuses("hf auth login", latents.check_encode, path=None)
    with pytest.raises(SettingError, match="mode=encode has nothing to do"):
        make_config(mode="encode")


def test_changed_shards_are_refused(folder, encoded, tmp_path):
    chosen = settings(folder, cache=str(tmp_path))
    shutil.copytree(latents.shard_folder(encoded), latents.shard_folder(chosen))
    latents.load(chosen, 0.5)
    shard = latents.shard_folder(chosen) / "train_000001.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SettingError, match=r"train_000001\.npy does not have the checksum"):
        latents.load(chosen, 0.5)
    shard.write_bytes(whole)
    latents.load(chosen, 0.5)
    shard.unlink()
    with pytest.raises(SettingError, match=r"train_000001\.npy is missing"):
        latents.load(chosen, 0.5)
    shard.write_bytes(whole)
    (latents.shard_folder(chosen) / "test_labels.npy").unlink()
    with pytest.raises(SettingError, match=r"test_labels\.npy cannot be read"):
        latents.load(chosen, 0.5)
    (latents.shard_folder(chosen) / "latents.json").write_text("{")
    with pytest.raises(SettingError, match=r"latents\.json is damaged"):
        latents.load(chosen, 0.5)


def test_a_full_disk_leaves_nothing_half_written(folder, encoded, tmp_path, monkeypatch):
    """The disk takes two batches of the second shard's file and no more; with room made, the same command goes on."""
    chosen = settings(folder, cache=str(tmp_path))
    original, made = latents.encode_batch, []

    class Full:
        def tobytes(self):
            raise OSError(28, "No space left on device")

    def encode_batch(vae, images):
        made.append(1)
        return Full() if len(made) == 4 else original(vae, images)

    monkeypatch.setattr(latents, "encode_batch", encode_batch)
    with pytest.raises(SettingError, match="No space left on device.*make room"):
        encode(chosen)
    names = {path.name for path in latents.shard_folder(chosen).iterdir()}
    assert names == {
        "plan.json",
        "train_labels.npy",
        "test_labels.npy",
        "train_000000.npy",
        "train_000000.json",
        "train_000001.part",
    }
    encode(chosen)
    assert contents(latents.shard_folder(chosen)) == contents(latents.shard_folder(encoded))
    monkeypatch.setattr(latents.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(SettingError, match="name another disk"):
        encode(settings(folder, cache=str(tmp_path / "small")))


@pytest.mark.parametrize("room", [300, 9000, 16384, 40000])
def test_a_file_that_cannot_grow_is_said_in_a_sentence(folder, encoded, tmp_path, room):
    """The kernel itself refuses, within labels, plan, or a shard, as a full disk does; with room made, the bytes are the same."""
    chosen = settings(folder, cache=str(tmp_path))
    given = {"path": chosen.path, "vae": chosen.vae, "cache": chosen.cache, "image_size": 16, "size": 8, "num_classes": 2}
    overrides = [f"data.{key}={value}" for key, value in {**given, "batch_size": 4, "shard_size": 8}.items()]
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += (
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, -1)); sys.path.insert(0, {str(ROOT)!r}); import main; main.main()"
    )
    arguments = [sys.executable, "-c", limited, "mode=encode", "data=imagenet256_latents", "threads=1", "log.progress=false"]
    result = subprocess.run(
        [*arguments, *overrides, "hydra.output_subdir=null"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    shards = latents.shard_folder(chosen)
    if room < 16384 + 128:  # of a shard of 8 images
        assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
        assert "cannot be written (File too large): make room" in result.stderr
        assert not (shards / "latents.json").exists() and not list(shards.glob("train_0*.npy"))
    encode(chosen)
    assert contents(shards) == contents(latents.shard_folder(encoded))
