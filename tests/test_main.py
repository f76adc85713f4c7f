"""The command line: one sentence before any work for what cannot work, and the same bits in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, TINY, command_line, make_config
from test_train import state

import sampler
from checkpoint import load_model
from config import SamplerConfig


def only_run(folder):
    runs = [path for path in folder.iterdir() if (path / "checkpoint").is_dir()]
    assert len(runs) == 1
    return runs[0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A tiny run of the default mode, from a folder that is not the project's."""
    folder = tmp_path_factory.mktemp("demo")
    result = command_line(*TINY, "eval.guidance=[1,1.5]", "eval.likelihood_images=2", "eval.likelihood_steps=4", cwd=folder)
    return folder, result


def test_default_mode_trains_samples_and_scores(demo):
    folder, result = demo
    run = only_run(folder / "runs")
    assert str(run.relative_to(folder)) in result.stdout and "label_accuracy" in result.stdout
    for name in ("config.yaml", "metrics.jsonl", "results.json", "plots/loss.png", "plots/partition.png"):
        assert (run / name).stat().st_size > 0
    results = json.loads((run / "results.json").read_text())
    assert [r["kind"] for r in results] == ["heldout_loss", "likelihood", "samples", "samples", "floor"]
    for r in results:
        protocol = r["protocol"]
        for key in ("weights", "steps_trained", "checksums", "trained", "trained_on", "data_fingerprint", "environment"):
            assert protocol[key] not in (None, "", {}), key
    samples = results[2]
    assert samples["protocol"]["sampler"]["guidance"] == 1.0 and samples["protocol"]["visits"] == [2, 1, 1]
    assert samples["scores"]["label_accuracy"]["count"] == 1
    grids = [run / one["images"] / "grid.png" for r in results[2:4] for one in r["sets"]]
    assert all(path.is_file() for path in grids) and len(set(grids)) == 2
    assert not list(folder.glob("*.log")) and not (folder / "outputs").exists()


def test_finished_work_is_not_done_again(demo):
    folder, _ = demo
    run = only_run(folder / "runs")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")} | {
        path: path.stat().st_mtime_ns for path in run.rglob("samples.npz")
    }
    command_line(*TINY, "eval.guidance=[1,1.5]", "eval.likelihood_images=2", "eval.likelihood_steps=4", cwd=folder)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert len(json.loads((run / "results.json").read_text())) == 5


def test_sample_and_evaluate_by_folder(demo):
    folder, _ = demo
    run = only_run(folder / "runs")
    result = command_line(
        "mode=sample", f"folder={run}", "sampler.labels=3", "sampler.num_images=4", "sampler.format=png", cwd=folder
    )
    path = result.stdout.split("samples: ")[1].strip()
    images, labels = sampler.load_arrays(path)
    assert images.shape == (4, 1, 8, 8) and labels.tolist() == [3] * 4
    assert result.stdout.count("\n") == 1  # no data set is opened for it
    refused = command_line("mode=sample", f"folder={run}", "model.depth=6", cwd=folder, expect=1)
    assert "model.depth was typed" in refused.stderr


def test_readme_s_five_lines(demo):
    """Load a trained model and sample eight images of one class; the README shows these lines."""
    folder, _ = demo
    lines = (ROOT / "README.md").read_text().split("<!-- five lines -->")[1].split("```python\n")[1].split("```")[0]
    assert len([line for line in lines.splitlines() if line.strip()]) == 5
    namespace = {}
    exec(lines.replace("runs/RUN", str(only_run(folder / "runs"))), namespace)
    assert namespace["images"].shape == (8, 1, 8, 8)
    model = load_model(only_run(folder / "runs"))
    again, _ = sampler.sample_images(model, SamplerConfig(labels=3, num_images=8, guidance=1.5))
    assert np.array_equal(namespace["images"], again)


def test_one_resident_block_gives_the_same_images(demo):
    run = only_run(demo[0] / "runs")
    settings = SamplerConfig(labels=3, num_images=4, guidance=1.5)
    one = load_model(run, resident="one")
    images, _ = sampler.sample_images(one, settings)
    assert np.array_equal(images, sampler.sample_images(load_model(run), settings)[0])
    assert list(one.modules.held) == ["block_2"] and len(one.modules) == 3


def test_two_process_merge_equals_one_process(tmp_path):
    """Two jobs in processes of their own, merged by the command line: the bits of one process, found by the same settings."""
    settings = [*TINY, "model.depth=4", "partition.num_blocks=2"]
    command_line("mode=train", *settings, cwd=tmp_path)
    whole = only_run(tmp_path / "runs")
    jobs = [tmp_path / "job0", tmp_path / "job1"]
    for block, job in enumerate(jobs):
        command_line("mode=train", *settings, f"train.blocks=[{block}]", f"folder={job}", cwd=tmp_path)
    command_line("mode=merge", *settings, f"merge.runs=[{jobs[1]},{jobs[0]}]", "out=merged", cwd=tmp_path)
    merged = only_run(tmp_path / "merged")
    assert merged.name == whole.name
    assert state(merged) == state(whole)
    result = command_line("mode=sample", *settings, "out=merged", "sampler.num_images=2", cwd=tmp_path)
    assert "samples.npz" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_at_some_step_and_resumed(tmp_path, number):
    settings = [*TINY, "train.steps=400", "train.checkpoint_every=20", "mode=train"]
    command_line(*settings, "out=whole", cwd=tmp_path)
    log = tmp_path / "log"
    arguments = [sys.executable, str(ROOT / "main.py"), "threads=1", "log.progress=false", *settings, "out=cut"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            arguments, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=errors, stderr=errors
        )
    deadline = time.time() + 120
    while not list(tmp_path.glob("cut/*/checkpoint/run.json")) and time.time() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    status = process.wait(timeout=60)
    cut = only_run(tmp_path / "cut")
    made = sum(part["step"] for part in json.loads((cut / "checkpoint" / "run.json").read_text())["parts"].values())
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL and made % 20 == 0
    else:
        assert status == 128 + number and "stopped by signal" in log.read_text()
    assert 0 < made < 1200
    command_line(*settings, "out=cut", cwd=tmp_path)
    assert state(cut) == state(only_run(tmp_path / "whole"))


def test_folder_in_use_is_refused(tmp_path):
    settings = [*TINY, "mode=train", "folder=run"]
    arguments = [sys.executable, str(ROOT / "main.py"), "threads=1", "log.progress=false", *settings, "train.steps=100000"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    refused = command_line(*settings, cwd=tmp_path, expect=1)
    assert "another process works in run" in refused.stderr
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_sweep(tmp_path):
    command_line("mode=train", *TINY, "seed=0,1", "-m", cwd=tmp_path)
    assert len(list((tmp_path / "runs").glob("digits_*"))) == 2


def test_offline_wandb_writes_and_exits(tmp_path):
    command_line("mode=train", *TINY, "log.wandb=offline", cwd=tmp_path, timeout=90)
    assert list(only_run(tmp_path / "runs").glob("wandb/offline-run-*/*.wandb"))


# (overrides, what the sentence names). Each fails before any work: no run folder with anything in it is left behind.
BAD = [
    (["train.stepz=5"], "stepz"),
    (["+train.stepz=5"], "stepz"),
    (["+extra=5"], "extra"),
    (["experiment=cifar10_dit_s3"], "cifar10_dit_s3"),
    (["partition.num_blocks=13"], "num_blocks=13"),
    (["partition.num_blocks=0"], "num_blocks=0"),
    (["partition=custom", "partition.num_blocks=2", "partition.edges=[80,90,0.002]"], "decrease"),
    (["partition.edges=[80,1,0.002]"], "partition.edges"),
    (["partition.layers=[4,4]"], "layers="),
    (["partition.overlap=-0.1"], "partition.overlap"),
    (["method=end_to_end", "partition.num_blocks=3"], "end_to_end"),
    (["train.steps=0"], "train.steps"),
    (["sampler.steps=0"], "sampler.steps"),
    (["eval.guidance=[-1]"], "guidance"),
    (["eval.guidance=[[1,2]]"], "guidance"),
    (["mode=train", "sampler.guidance=-1"], "guidance"),
    (["train.label_dropout=0"], "label dropout"),
    (["sampler.labels=10"], "sampler.labels"),
    (["sampler.labels=[1,-1]"], "sampler.labels"),
    (["train.blocks=[3]"], "train.blocks"),
    (["train.blocks=[0,0]"], "train.blocks"),
    (["train.precision=fp8"], "train.precision"),
    (["train.batch_size=many"], "batch_size"),
    (["train.offload=true"], "train.offload"),
    (["mode=profile", "train.compile=true"], "train.compile was typed"),
    (["mode=plan", "memory=1GiB", "train.micro_batch=4"], "train.micro_batch was typed"),
    (["train.switch_every=0"], "train.switch_every"),
    (["sampler.resident=two"], "sampler.resident"),
    (["model.patch_size=3"], "patch_size"),
    (["model.size=M"], "model.size"),
    (["model.width=66", "model.heads=4"], "width"),
    (["objective.sigma_min=100"], "sigma_max"),
    (["mode=sample"], "holds no checkpoint"),
    (["mode=evaluate", "folder=nowhere"], "nowhere"),
    (["mode=merge"], "merge.runs"),
    (["mode=paint"], "mode"),
    (["folder=''"], "folder"),
    (["threads=100000"], "threads"),
    (["partition.overlap=1e6"], "partition.overlap"),
    (["objective.P_mean=1000"], "P_mean"),
    (["train.warmup_steps=5000"], "warmup_steps"),
    (["merge.force=true"], "merge.force"),
    (["model.name=unet"], "model.name"),
    (["objective.name=ddpm"], "objective.name"),
    (["method.name=hebbian"], "method.name"),
    (["train.blocks=[0,a]"], "train.blocks"),
    (["train.blocks=[]"], "train.blocks"),
    (["train.learning_rate=inf"], "learning_rate"),
    (["objective.sigma_max=inf"], "sigma_max"),
    (["objective.P_mean=nan"], "P_mean"),
    (["sampler.labels=true"], "sampler.labels"),
    (["method=shallow", "partition.overlap=0.3"], "partition.overlap"),
    (["method=end_to_end", "train.block_order=shufled"], "block_order"),
    (["sampler.guidance=2"], "eval.guidance"),
    (["eval.guidance=[]"], "eval.guidance"),
    (["eval.inception_weights=x"], "inception_weights"),
    (["mode=merge", "merge.runs=[a]"], "holds no checkpoint"),
    (["device=cuda:7"], "cuda:7"),
    (["device=tpu"], "device"),
    (["data=image_folder", "data.size=8", "data.channels=1", "data.num_classes=2"], "data.path"),
    (["data=cifar10", "model=dit_s2", "data.path=/does/not/exist"], "/does/not/exist"),
    (["data=hub"], "must be set"),
    (["out=/proc/runs"], "/proc/runs"),
    (["eval.features=inception-v3-compat"], "Inception|inception"),
    (["eval.features=inception-v3-compat", "eval.inception_weights=/does/not/exist"], "/does/not/exist"),
    (["sampler.num_images=3"], "num_images"),
    (["sampler.num_images=100000000000"], "sampler.num_images=100000000000: the images take 6400 GB"),
    (["data=cifar10", "model=dit_s2", "data.path=.", "eval.likelihood_images=5"], "likelihood|data.path"),
]


@pytest.mark.parametrize(("overrides", "names"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_bad_settings_are_refused_in_a_sentence(overrides, names, tmp_path, monkeypatch, capsys):
    """In this process, through Hydra's own composition, since starting Python costs seconds; one goes through a shell below."""
    import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(sys, "argv", ["main.py", "log.progress=false", *overrides])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    printed = capsys.readouterr().err + (exit_.value.code if isinstance(exit_.value.code, str) else "")
    assert exit_.value.code not in (0, None)
    assert re.search(names, printed), printed
    assert "Traceback" not in printed
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_end_to_end_needs_no_layer_for_each_block():
    """Of a cut that the method does not make nothing is refused; a micro-batch as large as the batch is none."""
    config = make_config(method={"name": "end_to_end"}, model={"depth": 1}, train={"micro_batch": 64, "batch_size": 8})
    assert config.partition.num_blocks == 1 and config.train.micro_batch is None


def test_what_memory_cannot_hold_is_said_in_a_sentence(tmp_path, monkeypatch, cache):
    """Numpy's words for it, and torch's."""
    import main

    monkeypatch.chdir(tmp_path)
    for setting in ("train.steps=1000000000000000", "model.width=100000000000"):
        arguments = ["main.py", "log.progress=false", "mode=train", "model.heads=1", f"data.cache={cache}", setting]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="error: out of memory .*: take a smaller model, batch or count"):
            main.main()


def test_bad_setting_from_a_shell(tmp_path):
    result = command_line("partition.num_blocks=13", cwd=tmp_path, expect=1)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_typo_in_an_overlay_is_refused(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "typo.yaml").write_text("# @package _global_\ntrain:\n  stepz: 5\n")
    result = command_line("experiment=typo", f"hydra.searchpath=[file://{tmp_path}]", cwd=tmp_path, expect=1)
    assert "stepz" in result.stderr and "Traceback" not in result.stderr


def test_checkpoint_of_another_partition_is_refused(demo):
    folder, _ = demo
    run = only_run(folder / "runs")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    refused = command_line(*TINY, f"folder={run}", "partition=log_uniform", cwd=folder, expect=1)
    assert "partition.name" in refused.stderr and refused.stderr.count("\n") <= 2
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


def test_labels_out_of_range_are_refused(tmp_path):
    refused = command_line(*TINY, "data.num_classes=9", cwd=tmp_path, expect=1)
    assert "num_classes=9" in refused.stderr


def test_help_reads_well(tmp_path):
    text = command_line("--help", cwd=tmp_path).stdout
    for words in (
        "the demo",
        "mode is one of",
        "partition: cross_entropy, custom, equal_nats, equi_probability",
        "num_blocks: 3",
    ):
        assert words in text


@pytest.fixture(scope="module")
def cifar_layouts(tmp_path_factory):
    """Twenty training and ten test images in CIFAR-10's binary layout and as Parquet."""
    import datasets

    folder = tmp_path_factory.mktemp("cifar10")
    generator = np.random.default_rng(0)
    (folder / "binary").mkdir()
    (folder / "parquet").mkdir()
    for split, files, count in (("train", [f"data_batch_{i}.bin" for i in range(1, 6)], 4), ("test", ["test_batch.bin"], 10)):
        images, labels = [], []
        for name in files:
            rows = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
            rows[:, 0] = np.arange(len(labels), len(labels) + count) % 10
            (folder / "binary" / name).write_bytes(rows.tobytes())
            labels += rows[:, 0].tolist()
            images += list(rows[:, 1:].reshape(count, 3, 32, 32).transpose(0, 2, 3, 1))
        table = datasets.Dataset.from_dict({"img": images, "label": labels})
        table = table.cast_column("img", datasets.Image()).cast_column("label", datasets.ClassLabel(num_classes=10))
        table.to_parquet(folder / "parquet" / f"{split}-00000-of-00001.parquet")
    return folder


def test_cifar10_dit_s2(cifar_layouts, tmp_path):
    """The paper's setting runs two steps, a sample and a score on both layouts, which hold the same images."""
    fingerprints = set()
    for layout in ("binary", "parquet"):
        settings = ["experiment=cifar10_dit_s2", f"data.path={cifar_layouts / layout}", f"data.cache={tmp_path / 'cache'}"]
        settings += [
            "train.steps=2",
            "train.batch_size=2",
            "sampler.num_images=2",
            "sampler.steps=3",
            "sampler.schedule=per_block",
        ]
        settings += ["eval.features=null", "eval.loss_images=2", "eval.loss_levels=3", f"out={tmp_path / layout}"]
        command_line(*settings, cwd=tmp_path)
        run = only_run(tmp_path / layout)
        results = json.loads((run / "results.json").read_text())
        assert np.isfinite(results[0]["scores"]["integrated"])
        fingerprints.add(results[0]["protocol"]["data_fingerprint"])
        command_line("mode=sample", *settings, cwd=tmp_path)
        images, labels = sampler.load_arrays(next(run.glob("samples/*/samples.npz")))
        assert images.shape == (2, 3, 32, 32) and labels.tolist() == [0, 1]
    assert len(fingerprints) == 1
