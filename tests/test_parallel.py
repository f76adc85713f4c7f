"""Several processes: the bits of one, or rounding where sums are made in another order; and nobody waits for the dead."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, make_config
from test_main import only_run
from test_train import state
from two_processes import SETTINGS, first_gradients

import parallel
import pipeline
from checkpoint import read_run
from config import SettingError
from experiments import traffic
from model import build_module
from parallel import ALONE, World

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}


def launch(*arguments, cwd):
    """Starts two processes; returns the launcher's."""
    return subprocess.Popen(
        [*LAUNCH, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache, digits):
    """Folder of what two processes made."""
    folder = tmp_path_factory.mktemp("two")
    process = launch(ROOT / "tests" / "two_processes.py", folder, cache, cwd=folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache):
    """Folder of the same run by one process."""
    folder = tmp_path_factory.mktemp("one")
    for mode in ("train", "sample"):
        pipeline.run(
            make_config(
                cache=cache,
                mode=mode,
                out=str(folder),
                log={"progress": False},
                sampler={"num_images": 10, "batch_size": 4, "steps": 3, "schedule": "per_block"},
                train=SETTINGS,
            )
        )
    return only_run(folder)


def joined_run(folder):
    """Returns the run with all blocks, beside which the jobs of single blocks may lie."""
    runs = [path for path in folder.iterdir() if len(list(path.glob("checkpoint/*/*.safetensors"))) == 3]
    assert len(runs) == 1
    return runs[0]


def difference(first, second):
    """Returns the root mean square and the largest difference of two runs' weights."""
    assert first.keys() == second.keys()
    keys = [key for key in first if ".raw." in key]
    gaps = np.concatenate([np.frombuffer(first[key], np.float32) - np.frombuffer(second[key], np.float32) for key in keys])
    return float(np.sqrt(np.square(gaps, dtype=np.float64).mean())), float(np.abs(gaps).max())


def test_blocks_apart_give_the_bits_of_one_process(one, two):
    run = joined_run(two / "apart")
    assert run.name == one.name
    assert state(run) == state(one)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows if row["block"] == 2) == list(range(2, 21, 2))


def test_samples_of_two_processes_are_those_of_one(one, two):
    expected = next(one.glob("samples/*/samples.npz")).read_bytes()
    assert next(joined_run(two / "apart").glob("samples/*/samples.npz")).read_bytes() == expected
    assert not list(joined_run(two / "apart").glob("samples/*/batches"))


@pytest.mark.parametrize("name", ["rows", "micro", "sharded"])
def test_rows_of_a_batch_change_rounding_only(one, two, name):
    """Half of each batch in either process, whatever holds the parameters: 20 steps from the same start."""
    rms, largest = difference(state(only_run(two / name)), state(one))
    print(f"{name}: rms {rms:.2e}, largest {largest:.2e}")
    assert 0 < rms <= 1e-6 and largest <= 1e-4


def test_first_gradients_agree(two, cache):
    shared, alone = torch.load(two / "gradients.pt", weights_only=True), first_gradients(ALONE, two, cache)
    gap = max(float((shared[name] - alone[name]).abs().max()) for name in alone)
    print(f"first gradients: largest difference {gap:.2e}")
    assert gap <= 1e-7 and max(float(value.abs().max()) for value in alone.values()) > 1e-3


def test_two_processes_resume_exactly(two):
    assert state(two / "resumed") == state(only_run(two / "rows"))
    assert state(two / "sharded_resumed") == state(only_run(two / "sharded"))
    machine = json.loads((two / "resumed" / "checkpoint" / "run.json").read_text())["machines"][-1]
    assert machine["processes"] == 2


@pytest.mark.parametrize("way", ["blocks", "data"])
def test_a_killed_process_ends_the_other_and_the_command_goes_on(tmp_path, cache, two, way):
    """One of two is killed without warning: the other ends with a message within a minute; then the run is as if nothing was."""
    settings = [ROOT / "main.py", *TINY, "mode=train", "threads=1", "log.progress=false", "train.steps=150"]
    settings += ["train.learning_rate=1e-3", "train.checkpoint_every=20", f"train.parallel={way}", f"data.cache={cache}"]
    cut = launch(*settings, "folder=cut", cwd=tmp_path)
    deadline = time.time() + 120
    while not list(tmp_path.glob("cut*/checkpoint/run.json")) and time.time() < deadline and cut.poll() is None:
        time.sleep(0.02)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(cut.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    killed = time.time()
    output, _ = cut.communicate(timeout=60)
    print(f"{way}: ended {time.time() - killed:.1f} s after the kill")
    assert cut.returncode != 0
    messages = ["stopped by signal 15"]  # the launcher's, which on a busy machine may come before the broken connection is seen
    if way == "data":
        messages.append("lost another one")
    assert any(message in output for message in messages), output
    assert not [part for part in parts(tmp_path / "cut") if part["step"] == 150]

    again = launch(*settings, "folder=cut", cwd=tmp_path)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    whole = two / "long"  # two processes with half of the batch each
    if way == "blocks":
        whole = pipeline.run(
            make_config(cache=cache, mode="train", out=str(tmp_path / "one"), log={"progress": False}, train={"steps": 150})
        )
    assert read_run(tmp_path / "cut")["identity"] == read_run(whole)["identity"]
    assert state(tmp_path / "cut") == state(whole)


def parts(folder):
    """Returns what run.json says of each part that the folder, or the jobs beside it, hold."""
    runs = [read_run(path) for path in folder.parent.glob(f"{folder.name}*")]
    return [part for run in runs if run is not None and len(run["parts"]) in (1, 3) for part in run["parts"].values()][:3]


def refused(match, world, **groups):
    with pytest.raises(SettingError, match=match):
        parallel.check(make_config(**{"mode": "train", **groups}), world)


def test_what_does_not_fit_the_number_of_processes_is_refused():
    three, four = World(0, 3), World(0, 4)
    refused("train.parallel=null with 3 processes", three)
    refused("train.batch_size=8 does not divide among the 3", three, train={"parallel": "data"})
    refused("torchrun", ALONE, train={"parallel": "data"})
    refused("4 processes are neither at most 3", four, train={"parallel": "blocks"})
    refused("more than one block", three, train={"parallel": "blocks"}, method={"name": "end_to_end"})
    refused("train.blocks=", three, train={"parallel": "blocks", "blocks": [0]})
    refused("train.shard=true", ALONE, train={"shard": True})
    for way in ("blocks", "data"):
        with pytest.raises(SettingError, match="share nothing"):
            parallel.check(make_config(mode="train", train={"parallel": way}), three, shared=True)
    refused("train.shard=true", three, train={"shard": True, "parallel": "blocks"})
    refused("choose one", four, train={"shard": True, "parallel": "data", "compile": True})
    refused("mode=merge", three, mode="merge")
    refused("mode=profile", three, mode="profile")
    refused("train.offload=true", three, train={"parallel": "blocks", "offload": True})
    refused("train.batch_size=9 does not divide among the 2", World(0, 6), train={"parallel": "blocks", "batch_size": 9})
    parallel.check(make_config(mode="train", train={"parallel": "blocks"}), World(0, 6))
    parallel.check(make_config(mode="sample"), three)
    with pytest.raises(SettingError, match="train.parallel=rows"):
        make_config(train={"parallel": "rows"})


@pytest.mark.parametrize(
    "settings",
    [["train.batch_size=9", "train.parallel=data"], ["partition.num_blocks=13"], ["data.num_classes=9", "train.parallel=data"]],
    ids=["first_checks", "all_read", "first_loads"],
)
def test_what_two_processes_are_refused_is_said_once(tmp_path, cache, settings):
    refused = launch(ROOT / "main.py", *TINY, "mode=train", f"data.cache={cache}", *settings, cwd=tmp_path)
    output, _ = refused.communicate(timeout=60)
    own = [line for line in output.splitlines() if line.startswith("error: ")]
    assert refused.returncode != 0 and len(own) == 1 and settings[0].partition("=")[0].split(".")[-1] in own[0], output


def test_rows_are_a_batch_cut_among_the_processes():
    assert [World(rank, 4).rows(12) for rank in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)]
    assert ALONE.rows(12) == slice(0, 12)


def test_jobs_of_single_blocks_are_found_and_joined(one, cache, tmp_path):
    """Without merge.runs the jobs' folders follow from the settings; a block that was trained longer takes the other's place."""
    settings = {"cache": cache, "out": str(tmp_path), "log": {"progress": False}}
    for block in range(3):
        pipeline.run(make_config(**settings, mode="train", train={**SETTINGS, "blocks": [block]}))
    joined = pipeline.run(make_config(**settings, mode="merge", train=SETTINGS))
    assert state(joined) == state(one)

    longer = str(tmp_path / "longer")
    pipeline.run(make_config(**settings, mode="train", folder=longer, train={**SETTINGS, "blocks": [1], "steps": 25}))
    both = {"runs": [str(joined), longer]}
    target = {"mode": "merge", "folder": str(tmp_path / "target"), "train": SETTINGS}
    with pytest.raises(SettingError, match="train.steps is 20 here and 25 there"):
        pipeline.run(make_config(**settings, **target, merge=both))
    replaced = pipeline.run(make_config(**settings, **target, merge={**both, "replace": True}))
    assert state(replaced) == {**state(one), **state(tmp_path / "longer")}
    short = {"runs": [longer, str(joined)], "replace": True}
    with pytest.raises(SettingError, match="20 of 25 steps"):
        pipeline.run(make_config(**settings, mode="merge", train={**SETTINGS, "steps": 25}, merge=short))


def sent_in_a_ring(numbers, processes):
    """Returns what process 0 sends in a ring that adds up `numbers` and gives everyone the sum, message by message."""
    sizes = [len(chunk) for chunk in np.array_split(np.zeros(numbers), processes)]
    scatter = [sizes[-step % processes] for step in range(processes - 1)]
    gather = [sizes[(1 - step) % processes] for step in range(processes - 1)]
    return sum(scatter + gather)


@pytest.mark.parametrize("processes", [1, 2, 4, 16])
def test_bytes_of_a_step(processes):
    assert traffic.bytes_per_step(1600, processes) == 4 * sent_in_a_ring(1600, processes)
    assert traffic.bytes_per_step(1600, processes, sharded=True) == 1.5 * traffic.bytes_per_step(1600, processes)
    assert traffic.bytes_per_step(1600, 1, border=100) == 400  # activations one way, their gradients the other, 2 bytes each


def test_the_page_shows_the_table_and_the_models_as_they_are():
    assert traffic.table() in (ROOT / "docs" / "scaling.md").read_text()
    sizes = {"size": "L", "depth": 24, "width": 1024, "heads": 16, "patch_size": 2}
    data = {"size": 32, "channels": 4, "num_classes": 1000}
    counts = []
    for blocks in (1, traffic.GROUPS):
        config = make_config(model=sizes, data=data, partition={"num_blocks": blocks})
        with torch.device("meta"):
            module = build_module(config, "block_0")
        counts.append(sum(parameter.numel() for parameter in module.parameters()))
    assert counts == pytest.approx([traffic.MODELS[0].parameters, traffic.MODELS[0].block], rel=1e-4)
