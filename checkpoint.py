"""Checkpoints made of named parts: save, load, resume, merge.

    run.json                          what the run is, and which generation holds, with a checksum per file
    <generation>/<part>.safetensors   weights, raw and EMA
    <generation>/<part>.optimizer.pt  optimizer state

A generation is written whole under a new name; then run.json, which names it, is replaced in one move; the previous one stays
until then. Nothing in a file is executed: weights are safetensors, the rest loads with weights_only=True.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import config as configuration
from config import SettingError, require
from hardware import set_up
from model import Model, OneResident, build_model, build_module, part_name

FORMAT = 1
SEPARATOR = "/"  # raw/<parameter>, ema/<parameter>


@dataclass
class Part:
    """One part of a model in training: a block, or what blocks share.

    Attributes:
        ema: moving average of the parameters, by name.
        step: optimizer steps that the part has made.
        seconds: time that they took, over all sessions.
    """

    module: nn.Module
    ema: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Files


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one move, on the disk before it has its name."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def checksum(path: Path) -> str:
    """Returns the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Creates a run's folder and makes sure that it can be written.

    Raises:
        SettingError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingError(f"the run's folder {folder} cannot be written ({error.strerror}): set out= or folder=") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run's folder; the lock goes with the process, however it ends.

    Raises:
        SettingError: another process holds it.
    """
    make_folder(folder)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"another process works in {folder}: wait for it, or set folder= to another one") from None
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Save and load


def read_run(folder: Path) -> dict[str, Any] | None:
    """Returns a run's run.json, or None where there is no checkpoint yet.

    Raises:
        SettingError: the file is not one that this code wrote.
    """
    path = folder / "checkpoint" / "run.json"
    if not path.exists():
        return None
    try:
        run = json.loads(path.read_text())
        known = run["format"] == FORMAT
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise SettingError(f"{path} is not a checkpoint's description ({error}): remove the folder or choose another") from None
    require(known, f"{path} has format {run['format']}, this code reads format {FORMAT}")
    return run


def save(folder: Path, parts: dict[str, Part], description: dict[str, Any]) -> None:
    """Writes a new generation with all parts, makes it the one that holds, and removes the one before.

    Args:
        description: what goes into run.json beside the parts: identity, machine, data.
    """
    top = folder / "checkpoint"
    top.mkdir(parents=True, exist_ok=True)
    before = read_run(folder)
    generation = f"{sum(part.step for part in parts.values()):09d}"
    if before is not None and before["generation"] == generation:
        return  # nothing has moved since
    target, temporary = top / generation, top / f"{generation}.tmp"
    for leftover in (target, temporary):  # of a save that was cut off
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    entries = {}
    for name, part in parts.items():
        tensors = {f"raw{SEPARATOR}{key}": value for key, value in part.module.state_dict().items()}
        tensors |= {f"ema{SEPARATOR}{key}": value for key, value in part.ema.items()}
        files = {"weights": f"{name}.safetensors", "optimizer": f"{name}.optimizer.pt"}
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary / files["weights"])
        torch.save(part.optimizer.state_dict(), temporary / files["optimizer"])
        described_files = {kind: described(temporary / file) for kind, file in files.items()}
        entries[name] = {"step": part.step, "seconds": round(part.seconds, 3), "files": described_files}
    commit_generation(folder, temporary, {**description, "parts": entries})


def described(path: Path) -> dict[str, str]:
    """Returns a file's name and checksum, after it has reached the disk and can be read by others (safetensors' cannot)."""
    path.chmod(0o644)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"name": path.name, "sha256": checksum(path)}


def commit_generation(folder: Path, temporary: Path, description: dict[str, Any]) -> None:
    """Makes a generation that was written whole under `<name>.tmp` the one that holds."""
    top = folder / "checkpoint"
    generation = temporary.name.removesuffix(".tmp")
    os.rename(temporary, top / generation)
    write_atomically(top / "run.json", json.dumps({"format": FORMAT, "generation": generation, **description}, indent=1) + "\n")
    for other in top.iterdir():
        if other.is_dir() and other.name != generation:
            shutil.rmtree(other, ignore_errors=True)


def part_file(folder: Path, run: dict[str, Any], name: str, kind: str) -> Path:
    """Returns a part's file after checking its checksum.

    Raises:
        SettingError: the run has no such part, or the file is missing or was changed.
    """
    require(name in run["parts"], f"{folder} holds {', '.join(run['parts'])}, not {name}")
    entry = run["parts"][name]["files"][kind]
    path = folder / "checkpoint" / run["generation"] / entry["name"]
    require(path.is_file() and checksum(path) == entry["sha256"], f"{path} is missing or does not have the checksum of run.json")
    return path


def load_weights(folder: Path, run: dict[str, Any], name: str, weights: str) -> dict[str, Tensor]:
    """Returns a part's raw or EMA weights by parameter name; no other part's files are read.

    Args:
        weights: `raw` or `ema`.
    """
    prefix = weights + SEPARATOR
    with safe_open(part_file(folder, run, name, "weights"), "pt") as file:
        keys = [key for key in list(file.keys()) if key.startswith(prefix)]
        return {key.removeprefix(prefix): file.get_tensor(key) for key in keys}


def restore(folder: Path, run: dict[str, Any], name: str, part: Part) -> None:
    """Loads a part's weights, EMA, optimizer state and step count in place."""
    part.module.load_state_dict(load_weights(folder, run, name, "raw"))
    for key, value in load_weights(folder, run, name, "ema").items():
        part.ema[key].copy_(value)
    path = part_file(folder, run, name, "optimizer")
    try:
        part.optimizer.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except (pickle.UnpicklingError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"{path} is not the optimizer state of {name} ({reason}): take the run's own file") from None
    part.step, part.seconds = run["parts"][name]["step"], run["parts"][name]["seconds"]


def load_model(
    folder: str | Path, weights: str = "ema", device: str = "auto", blocks: list[int] | None = None, resident: str = "all"
) -> Model:
    """Loads a trained model from a run's folder.

    Args:
        weights: `ema` or `raw`.
        blocks: the blocks to load; no file of another is read. None: all that the run holds.
        resident: `all`: every block is loaded; `one`: a block is read when it is used, and the one before is let go.

    Raises:
        SettingError: no checkpoint there, a file that was changed, or a block that the run does not hold.
    """
    folder = Path(folder)
    run = read_run(folder)
    require(run is not None, f"{folder} holds no checkpoint: train first, or give the folder of a run")
    config = configuration.load_config(folder / "config.yaml")
    hardware = set_up(device, run["machine"]["precision"], None)

    def load(name: str) -> nn.Module:
        module = build_module(config, name).eval()
        module.load_state_dict(load_weights(folder, run, name, weights), strict=weights == "raw")  # buffers are not averaged
        return module.to(hardware.device)

    names = list(run["parts"]) if blocks is None else [part_name(block) for block in blocks]
    for name in names:
        require(name in run["parts"], f"{folder} holds {', '.join(run['parts'])}, not {name}")
    if resident == "one":
        modules = OneResident([int(name.removeprefix("block_")) for name in names], lambda block: load(part_name(block)))
    else:
        modules = {name: load(name) for name in names}
    return build_model(config, modules, run["data"]["scale"], hardware)


# ---------------------------------------------------------------------------------------------------------------------
# What must agree


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Returns `field: ours against theirs` for every leaf in which two descriptions differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(ours.keys() | theirs.keys()):
            found += differences(ours.get(key), theirs.get(key), f"{name}.{key}".lstrip("."))
        return found
    return [] if ours == theirs else [f"{name} is {ours} here and {theirs} there"]


def check_resume(folder: Path, description: dict[str, Any]) -> list[str]:
    """Refuses to go on with a checkpoint of something else, where the folder holds one.

    What may change: device, logging, checkpoint and sample intervals; threads and library versions with a warning; more
    steps at a constant rate.

    Returns:
        Sentences to warn with.

    Raises:
        SettingError: names the first field that does not fit.
    """
    run = read_run(folder)
    if run is None:
        return []
    ours, theirs = json.loads(json.dumps(description["identity"])), json.loads(json.dumps(run["identity"]))
    more = ours["train"]["steps"] > theirs["train"]["steps"]
    if more and ours["train"]["schedule"] == "constant":
        theirs["train"]["steps"] = ours["train"]["steps"]
    found = differences({**ours, "data_found": description["data"]}, {**theirs, "data_found": run["data"]})
    require(not found, f"the checkpoint in {folder} does not fit: {'; '.join(found[:3])}. Set folder= to a new one")
    precision = (description["machine"]["precision"], run["machine"]["precision"])
    require(
        precision[0] == precision[1],
        f"the checkpoint in {folder} was trained in {precision[1]}, this machine chose {precision[0]}: "
        f"set train.precision={precision[1]}",
    )
    return [
        f"{difference}: results are the same within rounding, not to the bit"
        for difference in differences(description["machine"], run["machine"])
    ]


def merge(folders: list[Path], target: Path, identity: dict[str, Any], blocks: list[int], force: bool) -> dict[str, Any]:
    """Joins runs that trained different blocks of one model into one checkpoint, part by part, to the bit.

    Args:
        identity: of the merged model: the same settings with train.blocks=all.
        blocks: that the merged model must have.
        force: join although threads, device or versions differ.

    Returns:
        The merged run.json.

    Raises:
        SettingError: a folder without checkpoint, a block missing or there twice, unfinished, or any difference in what must
            agree, by name.
    """
    owners: dict[str, Path] = {}
    runs: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        run = read_run(folder)
        require(run is not None, f"merge.runs: {folder} holds no checkpoint")
        runs[folder] = run
        theirs = json.loads(json.dumps(run["identity"]))
        theirs["train"]["blocks"] = "all"
        found = differences(identity, theirs)
        require(not found, f"merge.runs: {folder} does not fit this configuration: {'; '.join(found[:3])}")
        first = runs[folders[0]]
        found = differences(first["data"], run["data"], "data")
        require(not found, f"merge.runs: {folder} and {folders[0]} differ: {'; '.join(found[:3])}")
        found = differences(first["machine"], run["machine"])
        require(
            force or not found,
            f"merge.runs: {folders[0]} and {folder} were not trained alike: {'; '.join(found[:3])}; merge.force=true joins them",
        )
        for name in run["parts"]:
            require(name not in owners, f"merge.runs: {name} is in {owners.get(name)} and in {folder}")
            owners[name] = folder
    wanted = [part_name(block) for block in blocks]
    require(sorted(owners) == sorted(wanted), f"merge.runs: the model has {', '.join(wanted)}, the runs have {', '.join(owners)}")

    before = read_run(target)
    require(before is None, f"{target} already holds a checkpoint: remove it or set folder= to another one")
    top = target / "checkpoint"
    top.mkdir(parents=True, exist_ok=True)
    steps = {name: runs[folder]["parts"][name]["step"] for name, folder in owners.items()}
    temporary = top / f"{sum(steps.values()):09d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    entries = {}
    for name in wanted:
        folder = owners[name]
        files = {}
        for kind in ("weights", "optimizer"):
            source = part_file(folder, runs[folder], name, kind)
            shutil.copyfile(source, temporary / source.name)
            files[kind] = described(temporary / source.name)
        entries[name] = {**runs[folder]["parts"][name], "files": files}
    first = runs[folders[0]]
    origin = {"data": first["data"], "machine": first["machine"], "merged_from": [str(folder) for folder in folders]}
    commit_generation(target, temporary, {"identity": identity, **origin, "parts": entries})
    return read_run(target)
