"""The paper's tables: every overlay at every scale, sweeps that survive a failing run, records and the report."""

import dataclasses
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY, command_line
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import Image
from test_data import write_binary, write_idx

import config as configuration
import main
import pipeline
from experiments import benchmark, collect, report
from hydra_plugins.surviving_sweeper import SurvivingSweeper, reason

CONFIGS = ROOT / "configs"
OVERLAYS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
IMAGES = [table for table in report.TABLES if table.scores in (report.IMAGES, report.SAMPLED)]
TABLES = [table.name for table in IMAGES if not table.experiment]  # of images, with an overlay of their own
OTHERS = sorted({table.records for table in report.TABLES} - set(TABLES))  # their overlays list their commands
SCALES = ("cifar10", "digits", "fashion", "imagenet256")  # of models that draw images; the others' tests run their own

# One step, ten images (the fewest that can be scored) with a sampling step for each block, one score of each kind.
SHRUNK = ("model.depth=12", "model.width=8", "model.heads=2", "train.steps=1", "train.batch_size=2", "train.sample_every=0")
SHRUNK += ("train.precision=fp32", "train.evaluate_every=0", "sampler.num_images=10", "eval.guidance=[1.0]")
SHRUNK += (
    "sampler.steps=6",
    "sampler.schedule=per_block",
    "eval.loss_levels=3",
    "eval.loss_images=4",
    "eval.repeats=1",
    "threads=1",
    "log.progress=false",
)


@pytest.fixture(scope="module", autouse=True)
def configs():
    assert main.store.list("data")  # importing main registers the schema
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


@pytest.fixture(scope="module")
def made_data(tmp_path_factory, images_and_vaes) -> dict[str, list[str]]:
    """Overrides that put each scale on small made data; digits need none."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("made")

    def splits(channels: int, size: int) -> dict:
        shape = (20, channels, size, size)
        return {name: (random.integers(0, 256, shape, dtype=np.uint8), np.arange(20) % 10) for name in ("train", "test")}

    cifar, fashion = write_binary(folder / "cifar", splits(3, 32)), write_idx(folder / "fashion", splits(1, 28), zipped=False)
    encoded = [f"data.path={images_and_vaes / 'images'}", f"data.vae={images_and_vaes / 'vae'}", f"data.cache={folder}"]
    encoded += ["data.image_size=16", "data.size=8", "data.num_classes=2", "eval.features=null"]
    pipeline.run(resolved("mode=encode", "data=imagenet256_latents", *encoded, "log.progress=false"))
    return {
        "digits": [],
        "imagenet256": encoded,
        "cifar10": [f"data.path={cifar}", "model.patch_size=16", "eval.features=null", f"data.cache={folder / 'cache'}"],
        "fashion": [f"data.path={fashion}", f"data.cache={folder / 'cache'}"],
    }


def settings_of(*overrides: str) -> list[list[str]]:
    """Returns the overrides that the sweep of an overlay gives each of its runs."""
    params = compose("config", list(overrides), return_hydra_config=True).hydra.sweeper.params or {}
    swept = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    return BasicSweeper.split_arguments(swept, None)[0]


def commands_of(table: str) -> list[list[str]]:
    """Returns the overrides of each run that the sweeps in an overlay's first lines ask for."""
    lines = (CONFIGS / "experiment" / f"{table}.yaml").read_text().splitlines()
    typed = [shlex.split(line)[4:] for line in lines if line.startswith("# python main.py -m ")]
    swept = compose("config", [f"experiment={table}"], return_hydra_config=True).hydra.sweeper.params or {}
    params = [f"{key}={value}" for key, value in swept.items()]
    parsed = [OverridesParser.create().parse_overrides([*params, *overrides]) for overrides in typed]
    return [setting for overrides in parsed for setting in BasicSweeper.split_arguments(overrides, None)[0]]


def resolved(*overrides: str) -> configuration.Config:
    composed = compose("config", list(overrides))
    OmegaConf.resolve(composed)
    return configuration.resolve(OmegaConf.to_object(composed))


# ---------------------------------------------------------------------------------------------------------------------
# Overlays


@pytest.mark.parametrize("scale", SCALES)
def test_every_overlay_runs_at_every_scale(scale, made_data, tmp_path):
    """The last setting of each table runs one step, one set of images and one score."""
    for table in TABLES:
        overrides = [f"experiment={table}", f"scale={scale}"]
        setting = settings_of(*overrides)[-1]
        config = resolved(*overrides, *setting, *SHRUNK, *made_data[scale], f"out={tmp_path}")
        folder = pipeline.run(config, {"experiment": table})
        kinds = {result["kind"] for result in json.loads((folder / "results.json").read_text())}
        assert kinds == ({"heldout_loss"} if config.eval.features is None else {"heldout_loss", "samples", "floor"})
        if config.eval.features is None:  # whose features need a download
            pipeline.run(dataclasses.replace(config, mode="sample", folder=str(folder)))
        assert len(list((folder / "samples").rglob("samples.npz"))) == 1


@pytest.mark.parametrize("paper", ["v1", "v4"])
@pytest.mark.parametrize("table", TABLES)
def test_every_setting_of_every_table_is_valid(table, paper):
    if (table, paper) == ("layers", "v1"):
        return  # version 1 has 4 blocks and no such table
    overrides = [f"experiment={table}", f"paper={paper}"]
    settings = settings_of(*overrides)
    runs = [resolved(*overrides, *setting) for setting in settings]
    assert len(runs) == len({tuple(setting) for setting in settings}) > 1


def test_overlays_start_with_command_hardware_and_duration():
    for table in TABLES:
        lines = (CONFIGS / "experiment" / f"{table}.yaml").read_text().splitlines()
        assert lines[1].startswith(f"# python main.py -m experiment={table} "), table
        head = " ".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
        assert "core" in head and ("minutes" in head or "hours" in head) and "Expect" in head, table


def test_versions_differ_where_the_paper_says():
    for paper, blocks, overlap, ablation in (("v1", 4, 0.1, 0.1), ("v4", 3, 0.05, 0.0)):
        cut = resolved(f"paper={paper}").partition
        assert (cut.num_blocks, cut.overlap) == (blocks, overlap)
        assert resolved(f"paper={paper}", "experiment=num_blocks").partition.overlap == ablation
        assert resolved(f"paper={paper}", "experiment=partition").partition.overlap == 0.0
        cut = resolved("experiment=cifar10_dit_s2", f"paper={paper}").partition
        assert (cut.num_blocks, cut.overlap) == (blocks, overlap)
    for paper, batch_size, vae in (("v1", 1024, "stabilityai/sdxl-vae"), ("v4", 512, "stabilityai/sd-vae-ft-ema")):
        config = resolved("experiment=main", "scale=imagenet256", f"paper={paper}")
        assert (config.train.batch_size, config.data.vae) == (batch_size, vae)


def test_imagenet256_is_that_of_either_version():
    config = resolved("experiment=imagenet256_dit_l2")
    assert (config.model.depth, config.model.width, config.partition.num_blocks, config.partition.overlap) == (24, 1024, 3, 0.05)
    assert (config.train.batch_size, config.train.learning_rate, config.train.label_dropout) == (512, 5e-5, 0.1)
    assert config.train.steps == round(100 * 1_281_167 / 512, -2)
    assert (config.sampler.steps, config.sampler.guidance, config.sampler.num_images) == (50, 2.0, 50_000)
    first = resolved("experiment=imagenet256_dit_l2", "paper=v1")
    assert (first.partition.num_blocks, first.partition.overlap, first.data.vae) == (4, 0.1, "stabilityai/sdxl-vae")
    assert (first.train.batch_size, first.train.learning_rate, first.train.steps) == (1024, 1e-4, 125_100)
    assert resolved("experiment=imagenet256_dit_l2", "paper=v1", "mode=encode").data == first.data


def test_tables_share_runs():
    """A setting that two tables have is one run."""

    def folder(*overrides: str):
        return configuration.run_folder(resolved(*overrides))

    equal = folder("experiment=partition", "partition=equi_probability", "train.block_probability=uniform")
    assert equal == folder("experiment=partition", "partition=equi_probability", "train.block_probability=mass")
    assert equal == folder("experiment=num_blocks", "partition.num_blocks=3")
    assert equal == folder("experiment=layers", "partition=equi_probability", "partition.layers=[4,4,4]")
    assert equal == folder("experiment=weighting", "objective.weighting=edm", "partition=equi_probability")
    assert equal != folder("experiment=main")
    assert folder("experiment=main", "method=end_to_end") == folder("experiment=num_blocks", "partition.num_blocks=1", "paper=v1")
    assert folder("method=end_to_end", "match=iterations") == folder("method=end_to_end")


def test_layers_are_a_ratio():
    assert resolved("partition.layers=[3,6,3]", "model=dit_l2", "data=cifar10").partition.layers == [6, 12, 6]
    with pytest.raises(configuration.SettingError, match="sum to the depth"):
        resolved("partition.layers=[3,6,4]")


def test_matched_iterations_are_shared():
    assert configuration.total_steps(resolved("train.steps=100")) == 300
    assert configuration.total_steps(resolved("train.steps=100", "match=iterations")) == 100
    assert configuration.total_steps(resolved("train.steps=100", "method=shallow")) == 300
    with pytest.raises(configuration.SettingError, match="match=iterations"):
        resolved("train.steps=2", "match=iterations")


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps


def test_a_failing_run_leaves_the_others_running_and_can_be_mended(tmp_path):
    """The middle run of three finds a file where its folder should be."""
    settings = (*TINY, "model.depth=2", "partition.num_blocks=2", "train.steps=1", f"out={tmp_path}")
    command = (*settings, "seed=0,1,2", "-m")
    wanted = {seed: configuration.run_folder(resolved(*settings, f"seed={seed}")) for seed in (0, 1, 2)}
    wanted[1].touch()
    failed = command_line(*command, cwd=tmp_path, expect=1)
    assert "1 of 3 runs failed" in failed.stderr and "seed=1" in failed.stderr and str(wanted[1]) in failed.stderr
    finished = {seed: (wanted[seed] / "results.json").stat().st_mtime_ns for seed in (0, 2)}

    wanted[1].unlink()
    command_line(*command, cwd=tmp_path)
    assert (wanted[1] / "results.json").is_file()
    assert finished == {seed: (wanted[seed] / "results.json").stat().st_mtime_ns for seed in (0, 2)}


def test_a_sweep_whose_folder_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/runs")):
        sweeper = SimpleNamespace(config=OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}}))
        with pytest.raises(SystemExit, match=f"error: the sweep's folder {folder} cannot be written .*: set out="):
            SurvivingSweeper.sweep(sweeper, ["seed=0,1"])


def test_a_failure_without_words_is_named_by_its_kind():
    assert reason(MemoryError()) == "MemoryError()" and reason(KeyError("lost")) == "KeyError('lost')"
    assert reason(configuration.SettingError("a sentence")) == "a sentence"


def test_exceptions_and_exits_alike_are_named_at_the_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import main, pipeline\n"
        "def run(config, asked, wait):\n"
        "    if config.seed == 1:\n"
        "        sys.exit(3)\n"
        "    if config.seed == 2:\n"
        "        raise KeyError('lost')\n"
        "    print('worked', config.seed)\n"
        "pipeline.run = run\n"
        "main.main()\n"
    )
    command = [sys.executable, str(script), "-m", "seed=0,1,2,3", f"out={tmp_path}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert result.returncode == 1 and "worked 0" in result.stdout and "worked 3" in result.stdout
    assert "2 of 4 runs failed" in result.stderr and "exited with 3" in result.stderr and "lost" in result.stderr


def test_finished_runs_are_not_scored_again(tmp_path, made_data, monkeypatch):
    config = resolved(*SHRUNK, f"out={tmp_path}")
    folder = pipeline.run(config, {"experiment": "main", "seed": 0})
    before = (folder / "results.json").read_bytes()
    monkeypatch.setattr(pipeline.KINDS["dit"], "evaluate", lambda *_: pytest.fail("scored again"))
    pipeline.run(config, {"experiment": "overlap", "seed": 0})
    assert (folder / "results.json").read_bytes() == before
    assert [asked["experiment"] for asked in json.loads((folder / "tables.json").read_text())] == ["main", "overlap"]
    monkeypatch.undo()
    pipeline.run(resolved(*SHRUNK, f"out={tmp_path}", "eval.guidance=[1.0,1.5]"))
    results = json.loads((folder / "results.json").read_text())
    assert [len(result["questions"]) for result in results] == [2, 2, 1, 2]  # held-out loss, guidance 1 and 1.5, floor


# ---------------------------------------------------------------------------------------------------------------------
# Records and report


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """A tiny run of the main table with a held-out curve."""
    out = tmp_path_factory.mktemp("tiny")
    config = resolved("experiment=main", *SHRUNK, "train.evaluate_every=1", f"out={out}")
    overrides = ["method=diffusion_blocks", "experiment=main", "seed=0", "threads=1", f"out={out}"]
    asked = {"experiment": "main", "scale": "digits", "paper": "v4", "match": "layer_work", "overrides": overrides}
    return pipeline.run(config, asked)


def test_a_run_becomes_records(tiny_run, tmp_path):
    others = {name: f"{name},kind\n1,2\n" for name in ("edges", "benchmark", "another")}  # what other scripts record
    for name, text in others.items():
        (tmp_path / f"{name}.csv").write_text(text)
    records = collect.Records(tmp_path)
    added = records.add(tiny_run)
    records.write()
    again = collect.Records(tmp_path)
    again.add(tiny_run)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.*")}
    again.write()
    assert before == {path.name: path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert others == {name: (tmp_path / f"{name}.csv").read_text() for name in others}

    rows = collect.read_rows(tmp_path / "main.csv")
    assert len(rows) == added and tuple(rows[0]) == collect.COLUMNS
    loss = next(row for row in rows if row["metric"] == "heldout_loss")
    assert loss["setting"] == "method=diffusion_blocks" and loss["command"].startswith("python main.py method=diffusion_blocks")
    assert loss["commit"] and "cpu" in loss["hardware"] and float(loss["value"]) > 0
    assert json.loads((tmp_path / "protocols.json").read_text())[loss["protocol"]]["trained.train.batch_size"] == 2
    (levels,) = collect.read_rows(tmp_path / "levels.csv")
    assert len(levels["loss"].split()) == 3
    (curve,) = collect.read_rows(tmp_path / "curves.csv")
    assert curve["step"] == "1 2 3"
    assert len(list((tmp_path / "samples").glob("main_digits_v4_layer_work_*.png"))) == 1


def test_points_of_another_protocol_are_left_out_of_a_curve(tiny_run, tmp_path):
    """A run that was scored on other images while it trained, until it was stopped."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    curve = [json.loads(line) for line in (run / "heldout.jsonl").read_text().splitlines()]
    curve[0]["protocol"]["images"] += 1
    (run / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    records = collect.Records(tmp_path)
    records.add(run)
    assert [row["step"] for row in records.series["curves"]] == ["2 3"]


def test_runs_that_miss_points_are_averaged_where_all_have_some():
    table = report.TABLES[0]
    row = {"table": table.name, "scale": "digits", "paper": "v4", "match": "layer_work", "protocol": "p", "setting": "a=1"}
    rows = [{**row, "step": "1 2 3", "loss": "4 5 6"}, {**row, "step": "1 3", "loss": "2 4"}]
    group = report.Group("digits", "v4", "layer_work")
    steps, losses = report.mean_series(rows, table, group, "step", "loss")
    assert steps.tolist() == [1, 3] and losses["a=1"].tolist() == [3, 5]
    apart = [rows[0], {**row, "step": "9", "loss": "1"}]
    assert report.mean_series(apart, table, group, "step", "loss")[1] == {}


def finished_run(folder: Path, seed: int = 0, table: str = "main") -> Path:
    """Writes what collect reads of a run that is scored."""
    asked = {"experiment": table, "scale": "digits", "paper": "v4", "match": "layer_work", "question": "q"}
    trained_on = {"precision": "fp32", "device": "cpu", "cpu": "a processor", "threads": 1}
    result = {
        "kind": "heldout_loss",
        "title": "held-out loss",
        "scores": {"integrated": 0.3},
        "by_level": {"levels": [0.1, 1.0], "loss": [0.2, 0.4]},
        "protocol": {"split": "test", "trained": {"seed": seed}, "trained_on": trained_on, "trained_at": None},
        "questions": ["q"],
    }
    files = {
        "tables.json": [{**asked, "overrides": ["method=end_to_end", f"seed={seed}"]}],
        "results.json": [result],
        "checkpoint/run.json": {"format": 1, "parts": {"block_0": {"seconds": 2.0}}},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def collected(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["collect", *map(str, arguments)])
        collect.main()


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:-9])


# What happens to a run or to the records, and what the sentence says.
DAMAGE = [
    (lambda run, records: shutil.rmtree(run), "is not there"),
    (lambda run, records: (run / "tables.json").unlink(), "no table has scores"),
    (lambda run, records: cut(run / "tables.json"), "tables.json is not a list of tables"),
    (lambda run, records: (run / "results.json").unlink(), "lacks what experiment=main asked for"),
    (lambda run, records: cut(run / "results.json"), "results.json is not a list of results"),
    (lambda run, records: (run / "results.json").write_text('[{"kind": "floor"}]'), "results.json is not a list of results"),
    (lambda run, records: shutil.rmtree(run / "checkpoint"), "holds no checkpoint"),
    (lambda run, records: cut(run / "checkpoint" / "run.json"), "run.json is not a checkpoint's description"),
    (lambda run, records: finished_run(run, table="edges"), "would replace .*edges.csv"),
    (lambda run, records: finished_run(run, table="levels"), "would replace .*levels.csv"),
    (lambda run, records: (records / "main.csv").write_text("table,score\nmain,1\n"), "would replace .*main.csv"),
    (lambda run, records: (records / "main.csv").write_text(""), "would replace .*main.csv"),
    (lambda run, records: cut(records / "main.csv"), "main.csv has a row that is cut off"),
    (lambda run, records: (records / "levels.csv").write_text("level\n1\n"), "levels.csv does not have the columns"),
    (lambda run, records: cut(records / "protocols.json"), "protocols.json is not a list of protocols"),
    (lambda run, records: (records / "protocols.json").unlink(), "protocols.json lacks"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damaged_runs_and_records_are_refused_in_a_sentence(damage, words, tmp_path):
    """Whole runs that are named beside it do not change the records either."""
    records, runs = tmp_path / "records", [finished_run(tmp_path / "runs" / str(seed), seed) for seed in (0, 1)]
    collected(runs[0], "--records", records)
    (records / "edges.csv").write_text("edges,kind\n1,2\n")
    other = [] if "no table" in words else [finished_run(tmp_path / "runs" / "2", 2)]
    damage(runs[1], records)
    before = {path: path.read_bytes() for path in records.rglob("*.*")}
    with pytest.raises(SystemExit, match=f"^error: .*{words}[^\n]*$"):
        collected(*other, runs[1], "--records", records)
    assert before == {path: path.read_bytes() for path in records.rglob("*.*")}


def test_records_that_cannot_be_written_are_a_sentence(tmp_path):
    (tmp_path / "records").touch()
    with pytest.raises(SystemExit, match="error: the records in .* cannot be written .*: set --records"):
        collected(finished_run(tmp_path / "run"), "--records", tmp_path / "records")


def test_what_has_no_scores_is_left_and_named(tmp_path, capsys):
    """What else lies in a sweep's folder, and runs that are under way; a run that is named twice is in the records once."""
    run, unfinished = finished_run(tmp_path / "finished"), finished_run(tmp_path / "unfinished", seed=1)
    (unfinished / "tables.json").unlink()
    (tmp_path / "multirun.yaml").touch()
    collected(run, tmp_path / "multirun.yaml", unfinished, run, "--records", tmp_path / "records")
    assert f"no table has scores in {unfinished}\n" in capsys.readouterr().out
    rows = collect.read_rows(tmp_path / "records" / "main.csv")
    assert [(row["seed"], row["metric"], row["value"], row["seconds"]) for row in rows] == [("0", "heldout_loss", "0.3", "2")]


def test_a_run_with_several_numbers_of_label_steps_is_a_setting_for_each(tmp_path):
    run = finished_run(tmp_path / "run", table="classification")
    (asked,), (loss,) = (json.loads((run / name).read_text()) for name in ("tables.json", "results.json"))
    asked["overrides"] = ["eval.label_steps=[2,6]", "seed=0"]
    results = [
        {
            **loss,
            "kind": "classification",
            "scores": {"accuracy": steps / 10},
            "protocol": {**loss["protocol"], "sampler": {"steps": steps}},
        }
        for steps in (2, 6)
    ]
    cost = {**loss, "kind": "training_cost", "scores": {"state_bytes": 5}}
    (run / "tables.json").write_text(json.dumps([asked]))
    (run / "results.json").write_text(json.dumps([*results, cost]))
    collected(run, "--records", tmp_path / "records")
    rows = collect.read_rows(tmp_path / "records" / "classification.csv")
    found = {(row["setting"], row["metric"]): row["value"] for row in rows}
    assert found == {
        ("eval.label_steps=[2]", "accuracy"): "0.2",
        ("eval.label_steps=[6]", "accuracy"): "0.6",
        ("eval.label_steps=[2,6]", "state_bytes"): "5",
    }


def test_a_damaged_list_of_tables_is_refused_before_the_work(tmp_path):
    config = resolved(*SHRUNK, f"folder={tmp_path}")
    (tmp_path / "lock").touch()
    (tmp_path / "tables.json").write_text("[{")
    with pytest.raises(configuration.SettingError, match="tables.json is not a list of tables"):
        pipeline.run(config, {"experiment": "main"})
    assert not (tmp_path / "checkpoint").exists()


def test_a_protocol_leaves_out_what_the_table_varies_and_nothing_else(tiny_run):
    result = json.loads((tiny_run / "results.json").read_text())[0]

    def protocol(setting: str = "", **trained: object) -> dict:
        changed = json.loads(json.dumps(result))
        for key, value in trained.items():
            group, _, name = key.partition("__")
            changed["protocol"]["trained"][group][name] = value
        return collect.protocol_of(changed, setting, "main")

    assert protocol() == protocol(partition__num_blocks=6, partition__overlap=0.2, train__block_probability="mass")
    assert protocol() != protocol(train__steps=2)
    assert protocol("train.steps=1") == protocol("train.steps=2", train__steps=2)
    assert protocol() != protocol(objective__weighting="flat")


def test_a_record_says_that_files_were_changed_beside_its_commit():
    assert collect.short_commit("0123456789abcdef") == "0123456789" and collect.short_commit(None) == ""
    assert collect.short_commit("0123456789abcdef-dirty", 7) == "0123456-dirty"


def test_a_measurement_is_recorded_with_its_own_precision_and_not_made_again(tmp_path, monkeypatch):
    made = []

    def measurement(hardware):
        made.append(hardware)
        yield benchmark.Row("a/b/2", 1.2, "<= 1.1", precision="fp32")
        yield benchmark.Row("a/b/3", 1.0, "<= 1.1")

    monkeypatch.setattr(benchmark, "RECORDS", tmp_path / "benchmark.csv")
    monkeypatch.setattr(benchmark, "MEASUREMENTS", {"made_up": measurement})
    assert not benchmark.run(["made_up"], "cpu", 1) and not benchmark.run(["made_up"], "cpu", 1)
    rows = benchmark.read_records()
    assert len(made) == 1 and [row["passed"] for row in rows] == ["no", "yes"]
    assert [row["precision"] for row in rows] == ["fp32", made[0].precision]


def test_new_settings_do_not_part_runs_from_the_records():
    """A setting that joined the schema stands in config.LATER, or today's runs could share no column with the recorded ones."""
    config = resolved("experiment=main", "scale=digits")
    result = {
        "kind": "heldout_loss",
        "protocol": {"trained": configuration.trained_identity(config), "trained_on": {"precision": ""}},
    }
    ours = {key for key in collect.protocol_of(result, "method=diffusion_blocks", "main") if key.startswith("trained.")}
    rows = [row for row in collect.read_rows(collect.RECORDS / "main.csv") if row["metric"] == "heldout_loss"]
    recorded = {row["protocol"] for row in rows if "train.steps" not in row["setting"]}
    protocols = json.loads((collect.RECORDS / "protocols.json").read_text())
    for key in recorded:
        assert ours == {name for name in protocols[key] if name.startswith("trained.")}


def test_a_setting_is_what_was_typed_but_where_it_ran():
    typed = ["method=shallow", "data.path=/somewhere", "objective.normalize=True", "out=runs", "log.progress=False", "seed=1"]
    assert collect.setting_of(typed) == "method=shallow objective.normalize=true"


@pytest.mark.parametrize("table", OTHERS)
def test_settings_of_a_table_share_its_columns(table):
    """Whatever an overlay's commands vary, methods, objectives and a preset among it, is left out of the protocol."""
    protocols = {}
    for overrides in commands_of(table):
        config = resolved(*overrides)
        protocol = {"sampler": dataclasses.asdict(config.sampler), "weights": config.sampler.weights, "split": "test"}
        if config.objective.name == "labels":
            protocol["sampler"] = {key: getattr(config.eval, key) for key in ("label_schedule", "initial_noise", "bridge")}
        protocol |= {"trained": configuration.trained_identity(config), "trained_on": {"precision": "fp32"}}
        setting = collect.setting_of(overrides)
        protocols[setting] = collect.protocol_of({"kind": "classification", "protocol": protocol}, setting, table)
    first = next(iter(protocols.values()))
    assert len(protocols) > 1 and first["trained.train.batch_size"] and first["trained.data.name"]
    for setting, protocol in protocols.items():
        assert protocol == first, setting


def test_settings_that_differ_in_what_their_table_does_not_vary_share_none():
    def protocol(*overrides: str) -> dict:
        trained = {"trained": configuration.trained_identity(resolved(*overrides)), "trained_on": {"precision": "fp32"}}
        return collect.protocol_of({"kind": "classification", "protocol": trained}, "", "classification")

    usual = protocol("experiment=classification")
    assert usual == protocol("experiment=classification", "method=end_to_end")
    assert usual != protocol("experiment=classification", "train.steps=500")
    assert usual != protocol("experiment=classification", "data.crop=0")


def row(setting: str, seed: int, value: float, **changes: str) -> dict[str, str]:
    usual = dict.fromkeys(collect.COLUMNS, "") | {"table": "overlap", "scale": "digits", "paper": "v1", "match": "layer_work"}
    return (
        usual | {"setting": setting, "seed": str(seed), "metric": "heldout_loss", "protocol": "p", "value": str(value)} | changes
    )


def test_rows_of_two_protocols_never_share_a_column():
    rows = [row("a", 0, 1.0), row("a", 1, 2.0, protocol="q"), row("a", 2, 3.0, guidance="1.5")]
    columns = report.columns_of(rows, dict.fromkeys("pq", {"split": "test"}))
    assert sorted(list(values["a"].values()) for values in columns.values()) == [[1.0], [2.0], [3.0]]


PAPER = {"partition.overlap=0": 45.5, "partition.overlap=0.1": 41.39, "partition.overlap=0.2": 56.69}


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([(0.32, 0.32), (0.30, 0.30), (0.40, 0.41)], "trend appears**"),
        ([(0.32, 0.32), (0.40, 0.41), (0.30, 0.30)], "is reversed"),
        ([(0.32, 0.32), (0.30, 0.30), (0.31, 0.31)], "appears in part"),
        ([(0.32, 0.30), (0.30, 0.32), (0.31, 0.32)], "not resolved"),
        ([(0.32,), (0.30,), (0.40,)], "not resolved"),
    ],
)
def test_verdicts_are_computed(ours, words):
    values = {setting: dict(enumerate(seeds)) for setting, seeds in zip(PAPER, ours, strict=True)}
    assert words in report.verdict("Held-out loss", values, PAPER)


def test_a_verdict_counts_single_seeds_and_ties_apart():
    """A pair with one seed has no standard error; settings that the paper has equal have no order."""
    ours = {"partition.overlap=0": {0: 0.32, 1: 0.33}, "partition.overlap=0.1": {0: 0.30, 1: 0.31}}
    ours["partition.overlap=0.2"] = {0: 0.40}
    found = report.verdict("Held-out loss", ours, PAPER)
    assert "Of 3 pairs of settings 1 differ as in the paper, 0 the other way, 2 have fewer than two seeds in common" in found
    assert "(by chance alone 0.3 would differ)" in found  # of one pair with one degree of freedom: 1 - 2 atan(2) / pi = .295
    tied = PAPER | {"partition.overlap=0": 41.39}
    assert "Of 2 pairs of settings 0 differ" in report.verdict("Held-out loss", ours, tied)
    assert "nothing to compare" in report.verdict("Held-out loss", ours, dict.fromkeys(PAPER, 41.39))


def test_best_and_span_are_of_the_seeds_that_all_settings_share():
    """The reference has a second seed in which everything is harder."""
    ours = {"partition.overlap=0": {0: 0.30, 1: 0.40}, "partition.overlap=0.1": {0: 0.31}, "partition.overlap=0.2": {0: 0.33}}
    found = report.verdict("Held-out loss", ours, PAPER)
    assert "our best is `partition.overlap=0`" in found
    assert "span 0.03, the seeds' spread is 0.07071 (best and span of the seeds that all share, 0)" in found
    ours["partition.overlap=0.1"] = {2: 0.31}
    assert "(no seed is shared by all)" in report.verdict("Held-out loss", ours, PAPER)


@pytest.mark.parametrize(("ours", "words"), [((0.94, 0.93, 0.5), "trend appears"), ((0.5, 0.93, 0.94), "is reversed")])
def test_verdicts_know_what_is_better(ours, words):
    """Accuracy is better higher, bits per character lower: the same order either way."""
    paper = {"method=end_to_end": 60.25, "method=diffusion_blocks": 59.3, "method=forward_forward": 7.85}
    accuracy = {setting: {0: value, 1: value + 0.001} for setting, value in zip(paper, ours, strict=True)}
    bits = {setting: {seed: 2 - value for seed, value in seeds.items()} for setting, seeds in accuracy.items()}
    for values, better in ((accuracy, "higher"), (bits, "lower")):
        found = report.verdict("Score", values, paper, better, "higher")
        assert words in found and "the paper's `method=end_to_end`" in found
        assert f"our best is `{max(accuracy, key=lambda setting: accuracy[setting][0])}`" in found


def test_a_score_that_is_not_finite_is_named_and_decides_nothing():
    nan, inf = math.nan, math.inf
    ours = {
        "partition.overlap=0": {0: 0.3, 1: 0.31},
        "partition.overlap=0.1": {0: nan, 1: 0.1},
        "partition.overlap=0.2": {0: 0.4, 1: 0.4},
    }
    found = report.verdict("Held-out loss", ours, PAPER)
    assert "(not finite: `partition.overlap=0.1`)" in found and "Of 1 pair of settings 1 differ as in the paper" in found
    assert "best" not in report.verdict("Held-out loss", {"a": {0: inf, 1: 1.0}}, PAPER)
    assert report.beyond_reference(ours, "partition.overlap=0.1").endswith("none.")
    assert report.with_spread({0: inf, 1: 1.0}) == "inf ± nan"
    rows = [row("a", 0, nan, metric=report.FID, guidance="1.0"), row("a", 0, 2.0, metric=report.FID, guidance="1.5")]
    assert report.best_guidance(report.columns_of(rows, {"p": {}})) == "1.5"


def test_a_setting_that_fails_does_not_choose_the_guidance():
    fids = {"1.0": {"three steps": 30.0, "many": 1.0, "more": 0.9}, "1.5": {"three steps": 10.0, "many": 2.0, "more": 2.0}}
    rows = [row(name, 0, fid, metric=report.FID, guidance=at) for at, found in fids.items() for name, fid in found.items()]
    assert report.best_guidance(report.columns_of(rows, {"p": {}})) == "1.0"


def write_records(folder: Path, rows: list[dict[str, str]]) -> Path:
    folder.mkdir()
    collect.write_rows(folder / "overlap.csv", rows, collect.COLUMNS)
    (folder / "protocols.json").write_text(json.dumps({"p": {"split": "test"}}))
    return folder


def damaged_strip(records: Path) -> None:
    (records / "samples").mkdir()
    (records / "samples" / collect.image_name(row("partition.overlap=0", 0, 0.3))).write_text("no image")


def test_few_records_and_odd_ones_make_a_report(tmp_path):
    """One setting of one seed; a seed that is not a number; pictures of other widths; a floor alone."""
    rows = [row("partition.overlap=0.1", 0, 0.3), row(collect.FLOOR, 0, 0.5, scale="fashion", metric=report.FID)]
    report.Report(write_records(tmp_path / "one", rows), tmp_path).write()
    assert "| `partition.overlap=0.1` |" in (tmp_path / "REPORT.md").read_text()
    assert "### fashion" not in (tmp_path / "REPORT.md").read_text()
    rows += [row("partition.overlap=0", seed, value) for seed, value in enumerate((math.nan, 0.3))]
    records = write_records(tmp_path / "several", rows)
    (records / "samples").mkdir()
    for index, own in enumerate(rows[::2]):
        strip = Image.fromarray(np.zeros((8, 8 + 8 * index), np.uint8))
        strip.save(records / "samples" / collect.image_name(own))
    report.Report(records, tmp_path).write()
    text = (tmp_path / "REPORT.md").read_text()
    assert "nan ± nan" in text and "not finite: `partition.overlap=0`" in text
    assert (tmp_path / "report" / "overlap_digits_v1_layer_work_samples.png").is_file()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda records: shutil.rmtree(records), "holds no records"),
        (lambda records: (records / "overlap.csv").unlink(), "holds no records"),
        (lambda records: (records / "protocols.json").unlink(), "protocols.json lacks p"),
        (lambda records: cut(records / "protocols.json"), "protocols.json is not a list of protocols"),
        (lambda records: cut(records / "overlap.csv"), "overlap.csv has a row that is cut off"),
        (lambda records: (records / "overlap.csv").write_text("edge\n1\n"), "overlap.csv does not have the columns"),
        (lambda records: (records / "benchmark.csv").write_text("name\n1\n"), "benchmark.csv does not have the columns"),
        (damaged_strip, "cannot be drawn"),
        (lambda records: (records / "edges.csv").write_bytes(b"\xff\xfe"), "edges.csv does not have the columns"),
    ],
)
def test_damaged_records_leave_the_report_as_it_was(damage, words, tmp_path, monkeypatch):
    records = write_records(tmp_path / "records", [row("partition.overlap=0", 0, 0.3)])
    (tmp_path / "report").mkdir()
    before = [tmp_path / "REPORT.md", tmp_path / "report" / "picture.png"]
    for path in before:
        path.write_text("before")
    damage(records)
    monkeypatch.setattr(sys, "argv", ["report", "--records", str(records), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"^error: .*{words}[^\n]*$"):
        report.main()
    assert [path.read_text() for path in before] == ["before", "before"]


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    records = write_records(tmp_path / "records", [row("partition.overlap=0", 0, 0.3)])
    (tmp_path / "out").touch()
    monkeypatch.setattr(sys, "argv", ["report", "--records", str(records), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="error: the report in .* cannot be drawn .*: set --out"):
        report.main()


@pytest.mark.parametrize(("typed", "words"), [("wrong_name", "no measurement wrong_name"), ("--threads=0", "at least 1")])
def test_a_benchmark_of_nothing_is_refused(typed, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", typed])
    with pytest.raises(SystemExit):
        benchmark.parse_arguments()
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="error: device=tpu"):
        benchmark.run([], "tpu", 1)


def test_the_paper_is_found_for_every_table_of_other_models():
    paper = collect.read_rows(ROOT / "experiments" / "paper_tables.csv")
    for table in report.TABLES:
        if table.name in TABLES:
            continue
        settings = {collect.setting_of(overrides) for overrides in commands_of(table.records)}
        assert table.reference in {setting for setting in settings if table.settings(setting)}, table.name
        known = {setting for columns in report.paper_columns(table, paper).values() for setting in columns}
        assert len(known & settings) > 1 or not known, table.name


def test_a_table_of_other_scores_shows_units_series_and_what_is_not_trivial():
    table = next(table for table in report.TABLES if table.name == "classification")
    values = {"accuracy": 0.9, "top5": 1.0, "state_bytes": 2.0**21, "accuracy_stage_0": 0.5, "accuracy_stage_1": 0.9}
    rows = [
        row(f"method={method}", seed, value + (0 if metric == "state_bytes" else seed / 100), metric=metric)
        for method in ("end_to_end", "greedy")
        for metric, value in values.items()
        for seed in (0, 1)
    ]
    for classes, wanted in ((10, []), (100, ["top-5, %"])):
        protocols = {"p": {"split": "test", "trained.data.num_classes": classes}}
        shown = report.shown_columns(table, report.columns_of(rows, protocols))
        usual = ["top-1, %", "top-1 after each step or group, %", "state, MiB"]
        assert [item.heading for item in shown] == [*usual[:1], *wanted, *usual[1:]]
    text = report.group_table(table, shown, {}, {"v4: cifar100, test top-1, %": {"method=end_to_end": 60.25}})
    assert "| `method=end_to_end` | 60.25 | 2 | 90.5 ± 0.71 |  | 100.5 ± 0.71 | 50.5, 90.5 | 2 |" in text
    assert "| `method=greedy` |  | 2 | 90.5 ± 0.71 | +0 ± 0 |" in text and "floor" not in text


def test_two_protocols_of_one_score_are_told_apart_and_meet_the_papers_split():
    """FID against either split; recall has no split in its heading, so its protocol stands there."""
    table = report.TABLES[0]
    rows = [
        row(f"method={method}", 0, fid, metric=metric, guidance=guidance, protocol=protocol)
        for method in ("end_to_end", "diffusion_blocks")
        for protocol in ("test1", "train")
        for guidance, fid in (("1.0", 9.0), ("2.0", 8.0 if protocol == "test1" else 10.5))
        for metric in (report.FID, "recall")
    ]
    columns = report.columns_of(rows, {"test1": {"split": "test"}, "train": {"split": "train"}})
    assert report.best_guidance(columns) == "1.0"  # 9 over both splits; at 2 the test split alone is lower
    shown = report.shown_columns(table, columns)
    assert [item.heading for item in shown if item.score.metric == "recall"] == ["recall (`test`)", "recall (`trai`)"]
    paper = report.paper_columns(table, collect.read_rows(ROOT / "experiments" / "paper_tables.csv"))
    group = report.Group("cifar10", "v4", "layer_work")
    for split, wanted in (("train", 30.59), ("test", 37.2), ("", 37.2)):
        assert report.paper_trend(table, group, paper, split)["method=diffusion_blocks"] == wanted
    assert report.paper_trend(table, group._replace(paper="v1"), paper, "train") == {}


def test_a_floor_stands_under_scores_of_its_own_protocol_alone():
    table, measured = report.TABLES[0], {"split": "test", "num_samples": 360, "features_sha256": "a"}
    protocols = {"real": measured | {"samples": "train images"}, "ours": measured | {"samples": "generated", "sampler.steps": 50}}
    protocols["more"] = protocols["ours"] | {"num_samples": 50_000}
    rows = [row(report.FLOOR, 0, 0.5, metric=report.FID, protocol="real")]
    for protocol in ("ours", "more"):
        rows.append(row("method=end_to_end", 0, 1.0, metric=report.FID, guidance="1.0", protocol=protocol))
    shown = report.shown_columns(table, report.columns_of(rows, protocols))
    floor = report.floors(rows, shown, protocols)
    assert {column.protocol: value for column, value in floor.items()} == {"ours": 0.5}
    assert report.group_table(table, shown, floor, {}).count("0.5 |") == 1


def test_what_the_paper_leaves_open_is_said():
    paper = collect.read_rows(ROOT / "experiments" / "paper_tables.csv")
    tables = {table.name: table for table in report.TABLES}
    settings = ["partition.num_blocks=1", "partition.num_blocks=3"]
    notes = report.paper_notes(tables["num_blocks"], paper, settings)
    assert "overlap inferred (v1 cifar10: `partition.num_blocks=3`)" in notes and "suspicious" in notes
    assert "not stated (v4 cifar100: `method=forward_forward`)" in report.paper_notes(
        tables["classification"], paper, ["method=forward_forward"]
    )
    assert report.paper_notes(tables["solver"], paper, settings) == ""


def test_the_paper_is_found_for_every_table_that_it_has():
    paper = collect.read_rows(ROOT / "experiments" / "paper_tables.csv")
    for table in (table for table in report.TABLES if table.name in TABLES):
        for columns in report.paper_columns(table, paper).values():
            for paper_version in ("v1", "v4"):
                swept = settings_of(f"experiment={table.name}", f"paper={paper_version}")
                assert set(columns) <= {collect.setting_of(setting) for setting in swept}, table.name
            assert table.reference in {collect.setting_of(setting) for setting in swept}


def test_the_report_is_what_the_records_give(tmp_path):
    texts = []
    for name in ("one", "two"):
        drawn = report.Report(collect.RECORDS, tmp_path / name)
        drawn.write()
        texts.append({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")})
    assert texts[0] == texts[1]
    assert texts[0]["REPORT.md"] == (ROOT / "experiments" / "REPORT.md").read_bytes()
    readme = report.README.read_text()
    assert drawn.into_readme(readme) == readme
