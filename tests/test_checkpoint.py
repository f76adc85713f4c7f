"""Checkpoints: nothing is lost, nothing is executed, what does not fit is refused by name."""

import json
import os

import numpy as np
import pytest
import torch
from conftest import make_classifier, make_config
from safetensors.torch import load_file, save_file
from test_train import fit, hardware, only, state

import checkpoint
import config as configuration
import train as training
from checkpoint import check_resume, load_model, locked, read_run
from config import SettingError
from model import build_objective, part_name

VERSIONS = dict.fromkeys(("torch", "python", "cpu", "commit"))


def description(config, data, **machine):
    found = training.describe(config, data.fingerprint, data.scale, hardware(config.train.precision), VERSIONS)
    found["machine"] |= machine
    return found


def merged(folders, target, config, force=False):
    identity = configuration.trained_identity(config)
    steps = {part_name(block): count for block, count in enumerate(training.steps_per_block(config, build_objective(config)))}
    checkpoint.merge(checkpoint.check_merge(folders, target, identity, steps, force), target, identity)
    return read_run(target)


@pytest.fixture(scope="module")
def jobs(digits, tmp_path_factory):
    """Folders of a job over all blocks and of one job per block."""
    folder = tmp_path_factory.mktemp("jobs")
    fit(make_config(), digits, folder / "all")
    for block in range(3):
        fit(make_config(train={"blocks": [block]}), digits, folder / f"{block}")
    return folder


def test_merge_equals_one_process(jobs, tmp_path):
    run = merged([jobs / "2", jobs / "0", jobs / "1"], tmp_path / "merged", make_config())
    assert list(run["parts"]) == ["block_0", "block_1", "block_2"]
    assert state(tmp_path / "merged") == state(jobs / "all")
    assert run["identity"] == read_run(jobs / "all")["identity"]


def test_merge_refuses_gaps_doubles_and_differences(jobs, digits, tmp_path):
    def refuses(match, *folders, **groups):
        with pytest.raises(SettingError, match=match):
            merged(list(folders), tmp_path / "target", make_config(**groups))
        assert read_run(tmp_path / "target") is None

    refuses("the model has block_0, block_1, block_2", jobs / "0", jobs / "2")
    refuses("block_0 is in", jobs / "0", jobs / "1", jobs / "2", jobs / "all")
    refuses("holds no checkpoint", jobs / "0", tmp_path / "nothing")
    refuses("partition.overlap", jobs / "0", jobs / "1", jobs / "2", partition={"overlap": 0.1})
    refuses("seed", jobs / "0", jobs / "1", jobs / "2", seed=1)
    fit(make_config(seed=1, train={"blocks": [2]}), digits, tmp_path / "other_seed")
    refuses("seed is 0 here and 1 there", jobs / "0", jobs / "1", tmp_path / "other_seed")


def test_merge_refuses_what_is_not_finished(jobs, digits, tmp_path):
    fit(make_config(train={"blocks": [2], "steps": 3}), digits, tmp_path / "short")
    with pytest.raises(SettingError, match=r"block_2 in .* has made 3 of 4 steps|train.steps"):
        merged([jobs / "0", jobs / "1", tmp_path / "short"], tmp_path / "target", make_config())
    run = json.loads((tmp_path / "short" / "checkpoint" / "run.json").read_text())
    run["identity"]["train"]["steps"] = 4  # stopped early
    (tmp_path / "short" / "checkpoint" / "run.json").write_text(json.dumps(run))
    with pytest.raises(SettingError, match=r"block_2 in .* has made 3 of 4 steps"):
        merged([jobs / "0", jobs / "1", tmp_path / "short"], tmp_path / "target", make_config())
    assert not (tmp_path / "target").exists()


def test_merge_joins_runs_whose_data_lie_elsewhere(digits, tmp_path):
    """Where the data lie, and whether the precision was named or found, is not what the weights depend on."""
    for block, data, train in ((0, {"path": "/here"}, {}), (1, {"path": "/there"}, {}), (2, {}, {"precision": "auto"})):
        config = make_config(data=data, train={**train, "blocks": [block]})
        config.train.precision, asked = "fp32", config.train.precision
        fit(config, digits, tmp_path / str(block))
        run = json.loads((tmp_path / str(block) / "checkpoint" / "run.json").read_text())
        run["identity"]["train"]["precision"] = asked
        (tmp_path / str(block) / "checkpoint" / "run.json").write_text(json.dumps(run))
    merged([tmp_path / str(block) for block in range(3)], tmp_path / "target", make_config())


def test_merge_compares_threads_and_versions(jobs, tmp_path):
    def edited(group, **values):  # a copy of job 2 whose description says something else
        target = tmp_path / "edited"
        target.mkdir(exist_ok=True)
        run = json.loads((jobs / "2" / "checkpoint" / "run.json").read_text())
        (run["machines"][-1] if group == "machine" else run[group]).update(values)
        (target / "checkpoint").mkdir(exist_ok=True)
        (target / "checkpoint" / "run.json").write_text(json.dumps(run))
        link = target / "checkpoint" / run["generation"]
        if not link.exists():
            link.symlink_to(jobs / "2" / "checkpoint" / run["generation"])
        return target

    config = make_config()
    with pytest.raises(SettingError, match="threads is 1 here and 2 there"):
        merged([jobs / "0", jobs / "1", edited("machine", threads=2)], tmp_path / "target", config)
    merged([jobs / "0", jobs / "1", edited("machine", threads=2)], tmp_path / "forced", config, force=True)
    assert state(tmp_path / "forced") == state(jobs / "all")
    with pytest.raises(SettingError, match="data.fingerprint"):
        merged([jobs / "0", jobs / "1", edited("data", fingerprint="other")], tmp_path / "target", config)


def test_merge_overwrites_nothing(jobs, tmp_path):
    folders = [jobs / str(block) for block in range(3)]
    merged(folders, tmp_path, make_config())
    with pytest.raises(SettingError, match="already holds a checkpoint"):
        merged(folders, tmp_path, make_config())


def test_a_merged_run_goes_on(jobs, digits, tmp_path):
    """Blocks trained apart, merged, then trained on in one process: the same bits as one process all along."""
    merged([jobs / str(block) for block in range(3)], tmp_path / "merged", make_config())
    longer = {"steps": 6}
    assert fit(make_config(train=longer), digits, tmp_path / "merged") == fit(make_config(train=longer), digits, tmp_path / "one")


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"partition": {"num_blocks": 2}}, "partition.num_blocks"),
        ({"partition": {"name": "log_uniform"}}, "partition.name"),
        ({"partition": {"overlap": 0.1}}, "partition.overlap"),
        ({"model": {"width": 32}}, "model.width"),
        ({"train": {"batch_size": 4}}, "train.batch_size"),
        ({"train": {"schedule": "cosine", "steps": 8}}, "train.schedule"),
        ({"train": {"steps": 3}}, "train.steps"),
        ({"seed": 1}, "seed"),
        ({"objective": {"sigma_max": 40.0}}, "objective.sigma_max"),
    ],
)
def test_resume_refuses_what_does_not_fit(jobs, digits, groups, field):
    with pytest.raises(SettingError, match=field):
        check_resume(jobs / "all", description(make_config(**groups), digits))


def test_resume_refuses_other_data_and_precision(jobs, digits):
    found = description(make_config(), digits)
    with pytest.raises(SettingError, match="fingerprint"):
        check_resume(jobs / "all", {**found, "data": {**found["data"], "fingerprint": "other"}})
    with pytest.raises(SettingError, match="train.precision=fp32"):
        check_resume(jobs / "all", description(make_config(train={"precision": "auto"}), digits, precision="bf16"))
    asked = make_config(train={"precision": "auto"})
    assert check_resume(jobs / "all", description(asked, digits, precision="fp32")) == []  # whether named or found
    assert check_resume(jobs / "all", description(make_config(data={"path": "/moved"}), digits)) == []


def test_a_setting_that_came_later_is_no_part_of_a_run_that_does_not_use_it(jobs, digits):
    """Whether a run was made before the setting was there, or written out when it was."""
    ours = description(make_config(), digits)
    for group, settings in configuration.LATER.items():
        for key, value in settings.items():
            assert key not in ours["identity"][group]
            written = {**ours, "identity": {**ours["identity"], group: {**ours["identity"][group], key: value}}}
            assert check_resume(jobs / "all", written) == []
            written["identity"][group][key] = "other"
            with pytest.raises(SettingError, match=f"{group}.{key}"):
                check_resume(jobs / "all", written)
    assert configuration.trained_identity(make_classifier())["data"]["crop"] == 1


def test_resume_allows_what_may_change(jobs, digits):
    assert check_resume(jobs / "all", description(make_config(), digits)) == []
    warnings = check_resume(jobs / "all", description(make_config(), digits, threads=7))
    assert len(warnings) == 1 and "threads" in warnings[0]
    assert "draw other noise" in check_resume(jobs / "all", description(make_config(), digits, device="NVIDIA"))[0]
    for groups in ({"train": {"steps": 9}}, {"train": {"log_every": 1, "checkpoint_every": 2}}, {"threads": 2, "device": "cpu"}):
        assert check_resume(jobs / "all", description(make_config(**groups), digits)) == []


def test_one_block_loads_without_the_others(jobs, tmp_path):
    run = merged([jobs / str(block) for block in range(3)], tmp_path, make_config())
    configuration.save_config(make_config(), tmp_path / "config.yaml")
    for name in ("block_0", "block_2"):
        for path in (tmp_path / "checkpoint" / run["generation"]).glob(f"{name}*"):
            path.unlink()
    model = load_model(tmp_path, blocks=[1])
    assert list(model.modules) == ["block_1"]
    with pytest.raises(SettingError, match="missing or does not have the checksum"):
        load_model(tmp_path)
    with pytest.raises(SettingError, match="not block_7"):
        load_model(tmp_path, blocks=[7])


def test_weights_are_what_they_say(digits, tmp_path):
    """`ema` and `raw` differ, and loading gives back the bits that were saved."""
    config = make_config()
    saved = fit(config, digits, tmp_path)
    configuration.save_config(config, tmp_path / "config.yaml")
    for weights in ("ema", "raw"):
        model = load_model(tmp_path, weights=weights)
        assert model.config == config and model.scale == digits.scale
        for key, value in model.modules["block_1"].named_parameters():
            assert value.detach().numpy().tobytes() == saved[f"block_1.{weights}.{key}"]
    assert any(saved[key] != saved[key.replace(".ema.", ".raw.")] for key in saved if ".ema." in key)


def test_changed_files_are_refused(digits, tmp_path):
    config = make_config()
    fit(config, digits, tmp_path)
    configuration.save_config(config, tmp_path / "config.yaml")
    run = read_run(tmp_path)
    path = checkpoint.part_file(tmp_path, run, "block_0", "weights")
    tensors = load_file(path)
    key = next(iter(tensors))
    tensors[key] = tensors[key] + 1
    save_file(tensors, path)
    with pytest.raises(SettingError, match="checksum"):
        load_model(tmp_path)
    (tmp_path / "checkpoint" / "run.json").write_text("{}")
    with pytest.raises(SettingError, match="not a checkpoint's description"):
        load_model(tmp_path)
    with pytest.raises(SettingError, match="holds no checkpoint"):
        load_model(tmp_path / "elsewhere")


def test_nothing_in_a_file_is_executed(digits, tmp_path):
    """A pickle that would run code in place of the optimizer state is refused, even with the right checksum."""
    config = make_config()
    fit(config, digits, tmp_path)
    flag = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (type(flag).touch, (flag,))

    run = read_run(tmp_path)
    path = checkpoint.part_file(tmp_path, run, "block_0", "optimizer")
    torch.save(Evil(), path)
    run["parts"]["block_0"]["files"]["optimizer"]["sha256"] = checkpoint.checksum(path)
    (tmp_path / "checkpoint" / "run.json").write_text(json.dumps(run))
    with pytest.raises(SettingError, match="not the optimizer state of block_0"):
        fit(make_config(train={"steps": 6}), digits, tmp_path)
    assert not flag.exists()


def test_second_run_in_a_folder_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(SettingError, match="another process works in"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_files_follow_the_umask(digits, tmp_path):
    """Some libraries write files that their owner alone can read."""
    umask = os.umask(0o027)
    try:
        fit(make_config(), digits, tmp_path)
    finally:
        os.umask(umask)
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert len(files) == 8 and {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_only_the_job_s_blocks_are_saved(jobs):
    run = read_run(jobs / "1")
    assert list(run["parts"]) == ["block_1"]
    names = {path.name for path in (jobs / "1" / "checkpoint" / run["generation"]).iterdir()}
    assert names == {"block_1.safetensors", "block_1.optimizer.pt", "run.json"}
    assert state(jobs / "1") == only(state(jobs / "all"), 1)
    assert np.isfinite(run["parts"]["block_1"]["seconds"])


def test_folders_of_others_are_refused(digits, tmp_path):
    """A folder with other files, and weights whose run.json is lost, are left alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("my: own")
    with pytest.raises(SettingError, match="not a run's folder"), locked(tmp_path / "mine"):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.yaml"]
    with locked(tmp_path / "run"):
        fit(make_config(), digits, tmp_path / "run")
    before = state(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "run.json").unlink()
    with locked(tmp_path / "run"):
        assert state(tmp_path / "run") == before  # the generation's copy speaks for it
    next((tmp_path / "run" / "checkpoint").glob("*/run.json")).unlink()
    with pytest.raises(SettingError, match="no run.json that names them"), locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_full_disk_costs_the_new_checkpoint_only(digits, tmp_path, monkeypatch, error):
    fit(make_config(train={"steps": 2}), digits, tmp_path)
    before = state(tmp_path)

    def full(*arguments):
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(checkpoint.WriteError, match="could not be written.*MiB free.*holds"):
        fit(make_config(), digits, tmp_path)
    monkeypatch.undo()
    assert state(tmp_path) == before and not list((tmp_path / "checkpoint").glob("*.tmp"))
