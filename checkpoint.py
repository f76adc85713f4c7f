"""Checkpoints made of named parts: save, load, resume, merge.

    run.json                          what the run is, and which generation holds, with a checksum per file
    <generation>/run.json             its copy, from which it is restored where it is missing
    <generation>/<part>.safetensors   weights, raw and EMA
    <generation>/<part>.optimizer.pt  optimizer state

A generation is written whole under a new name; then run.json, which names it, is replaced in one move; the previous one stays
until then. Nothing in a file is executed: weights are safetensors, the rest loads with weights_only=True.
"""

import contextlib
import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import config as configuration
import parallel
from config import SettingError, require
from files import checksum, differences, write_atomically
from hardware import set_up
from kinds import build_model, build_module, check_use
from model import Model, OneResident, part_name

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


class WriteError(RuntimeError):
    """A checkpoint that could not be written; the one before it holds."""


def check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be written, and one that holds something else than a run; creates nothing.

    Raises:
        SettingError: names the folder.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    require(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        f"the run's folder {folder} cannot be written, because of {existing}: set out= or folder=",
    )
    if existing == folder:
        require(
            not any(folder.iterdir()) or (folder / "lock").is_file(),
            f"{folder} is not empty and not a run's folder: set folder= to a new one",
        )
        top = folder / "checkpoint"
        require(
            read_run(folder) is not None or not any(top.glob("*[0-9]/*.safetensors")),
            f"{top} holds weights but no run.json that names them: put it back, or set folder= to a new one",
        )


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Holds a run's folder; the lock goes with the process, however it ends.

    Args:
        wait: until another process lets go of the folder, instead of refusing.

    Raises:
        SettingError: another process holds it.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SettingError(f"the run's folder {folder} cannot be locked ({error.strerror}): set out= or folder=") from None
    with os.fdopen(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"another process works in {folder}: wait for it, or set folder= to another one") from None
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Save and load


def read_run(folder: Path) -> dict[str, Any] | None:
    """Returns a run's run.json, or None where there is no checkpoint yet.

    Where it is missing (the first save was cut off just before it, or it was lost) the copy in a generation speaks for it.

    Raises:
        SettingError: the file is not one that this code wrote.
    """
    path = folder / "checkpoint" / "run.json"
    if not path.exists():
        copies = [copy for copy in folder.glob("checkpoint/*/run.json") if copy.parent.suffix != ".tmp"]
        if not copies:
            return None
        path = max(copies)
    try:
        run = json.loads(path.read_text())
        known = run["format"] == FORMAT
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise SettingError(f"{path} is not a checkpoint's description ({error}): remove the folder or choose another") from None
    require(known, f"{path} has format {run['format']}, this code reads format {FORMAT}")
    return run


def save(folder: Path, parts: dict[str, Part], description: dict[str, Any], write: bool = True) -> None:
    """Writes a new generation with all parts, makes it the one that holds, and removes the one before.

    Args:
        description: what goes into run.json beside the parts: identity, data, commit, machine (joined to those of earlier
            sessions).
        write: of several processes one writes; the others hand it their share of what is spread over them.
    """
    top = folder / "checkpoint"
    top.mkdir(parents=True, exist_ok=True)
    before = read_run(folder)
    generation = f"{sum(part.step for part in parts.values()):09d}"
    if before is not None and before["generation"] == generation:
        return  # nothing has moved since
    machines = before["machines"] if before is not None else []
    if description["machine"] not in machines[-1:]:
        machines = [*machines, description["machine"]]
    kept = {key: value for key, value in description.items() if key != "machine"}
    target, temporary = top / generation, top / f"{generation}.tmp"
    entries = {}
    with whole_or_not(folder, temporary):
        if write:
            for leftover in (target, temporary):  # of a save that was cut off
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir()
    for name, part in parts.items():
        tensors = {f"raw{SEPARATOR}{key}": value for key, value in part.module.state_dict().items()}
        tensors |= {f"ema{SEPARATOR}{key}": value for key, value in part.ema.items()}
        tensors, optimizer = parallel.whole(tensors), parallel.whole(part.optimizer.state_dict())
        if not write:
            continue
        with whole_or_not(folder, temporary):
            files = {"weights": f"{name}.safetensors", "optimizer": f"{name}.optimizer.pt"}
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary / files["weights"])
            torch.save(optimizer, temporary / files["optimizer"])
            described_files = {kind: described(temporary / file) for kind, file in files.items()}
        entries[name] = {"step": part.step, "seconds": round(part.seconds, 3), "files": described_files}
    if write:
        with whole_or_not(folder, temporary):
            commit_generation(folder, temporary, {**kept, "machines": machines, "parts": entries})


@contextlib.contextmanager
def whole_or_not(folder: Path, temporary: Path) -> Iterator[None]:
    """Removes a generation that cannot be written whole.

    Raises:
        WriteError: says why, and that the one before it holds.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own words for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(folder).free / 2**20
        raise WriteError(
            f"the checkpoint in {folder} could not be written ({error}; {free:.0f} MiB free); the one before it holds"
        ) from error


def described(path: Path) -> dict[str, str]:
    """Returns a file's name and checksum, after it has reached the disk and can be read by others (safetensors' cannot)."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"name": path.name, "sha256": checksum(path)}


def commit_generation(folder: Path, temporary: Path, description: dict[str, Any]) -> None:
    """Makes a generation that was written whole under `<name>.tmp` the one that holds."""
    top = folder / "checkpoint"
    generation = temporary.name.removesuffix(".tmp")
    text = json.dumps({"format": FORMAT, "generation": generation, **description}, indent=1) + "\n"
    write_atomically(temporary / "run.json", text)
    os.rename(temporary, top / generation)
    write_atomically(top / "run.json", text)
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
    held = part.module.state_dict()
    weights = load_weights(folder, run, name, "raw")
    part.module.load_state_dict({key: parallel.placed(value, held[key]) for key, value in weights.items()})
    for key, value in load_weights(folder, run, name, "ema").items():
        part.ema[key].copy_(parallel.placed(value, part.ema[key]))
    path = part_file(folder, run, name, "optimizer")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        part.optimizer.load_state_dict(parallel.placed_state(state, list(part.module.parameters())))
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
        SettingError: no checkpoint there, a file or tokenizer that was changed, or a block that the run does not hold.
    """
    folder = Path(folder)
    run = read_run(folder)
    require(run is not None, f"{folder} holds no checkpoint: train first, or give the folder of a run")
    config = configuration.load_config(folder / "config.yaml")
    configuration.require_dit(config, "resident=one", resident == "one")
    check_use(config, run)
    hardware = set_up(device, run["machines"][-1]["precision"], None)

    def load(name: str) -> nn.Module:
        tensors = load_weights(folder, run, name, "raw")
        if weights == "ema":
            tensors |= load_weights(folder, run, name, "ema")  # buffers are not averaged
        module = build_module(config, name).eval()
        module.load_state_dict(tensors)
        return module.to(hardware.device)

    names = list(run["parts"]) if blocks is None else [part_name(block) for block in blocks]
    for name in names:
        require(name in run["parts"], f"{folder} holds {', '.join(run['parts'])}, not {name}")
    modules = OneResident(names, load) if resident == "one" else {name: load(name) for name in names}
    return build_model(config, modules, run["data"]["scale"], hardware)


# ---------------------------------------------------------------------------------------------------------------------
# What must agree


def comparable(identity: dict[str, Any]) -> dict[str, Any]:
    """Returns what of a run's settings is compared.

    Not where the data lie, since their fingerprint is compared, nor the precision that was asked for, since the one that was
    used is.
    """
    plain = configuration.without_later(json.loads(json.dumps(identity)))
    for group, key in (("data", "path"), ("train", "precision")):
        plain[group].pop(key, None)
    return plain


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
    ours, theirs = comparable(description["identity"]), comparable(run["identity"])
    more = ours["train"]["steps"] > theirs["train"]["steps"]
    if more and ours["train"]["schedule"] == "constant":
        theirs["train"]["steps"] = ours["train"]["steps"]
    found = differences({**ours, "data_found": description["data"]}, {**theirs, "data_found": run["data"]})
    require(not found, f"the checkpoint in {folder} does not fit: {'; '.join(found[:3])}. Set folder= to a new one")
    machine, before = description["machine"], run["machines"][-1]
    require(
        machine["precision"] == before["precision"],
        f"the checkpoint in {folder} was trained in {before['precision']}, this machine chose {machine['precision']}: "
        f"set train.precision={before['precision']} and folder={folder}",
    )
    draws = " (a CPU and a GPU draw other noise)" if "cpu" in (machine["device"], before["device"]) else ""
    return [
        f"{difference}{draws if difference.startswith('device') else ''}: the run goes on, but not to the bit"
        for difference in differences(machine, before)
    ]


def check_merge(
    folders: list[Path],
    target: Path,
    identity: dict[str, Any],
    steps: dict[str, int],
    force: bool,
    replace: bool = False,
    again: bool = False,
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Refuses to join runs that do not make up one model.

    Args:
        identity: of the merged model: the same settings with train.blocks=all.
        steps: of every part that the merged model must have.
        force: join although threads, device or versions differ.
        replace: take a block that several runs hold from the last of them; at a constant rate they may have made other steps.
        again: the target may hold what the same folders were joined to before; it is replaced.

    Returns:
        For each part the folder that owns it, and that run's run.json.

    Raises:
        SettingError: a folder without checkpoint, a block missing, there twice or unfinished, a file that was changed, or any
            difference in what must agree, by name; a target that holds a checkpoint.
    """
    owners: dict[str, tuple[Path, dict[str, Any]]] = {}
    first = None
    for folder in folders:
        run = read_run(folder)
        require(run is not None, f"merge.runs: {folder} holds no checkpoint: train its block first, or name other folders")
        first = first or run
        theirs = comparable(run["identity"])
        theirs["train"]["blocks"] = "all"
        if replace and identity["train"]["schedule"] == "constant":
            theirs["train"]["steps"] = identity["train"]["steps"]
        found = differences(comparable(identity), theirs)
        require(not found, f"merge.runs: {folder} does not fit this configuration: {'; '.join(found[:3])}")
        found = differences(first["data"], run["data"], "data")
        require(not found, f"merge.runs: {folders[0]} and {folder} differ: {'; '.join(found[:3])}")
        found = [difference for machine in run["machines"] for difference in differences(first["machines"][0], machine)]
        require(
            force or not found,
            f"merge.runs: {folders[0]} and {folder} were not trained alike: {'; '.join(found[:3])}; merge.force=true joins them",
        )
        for name, part in run["parts"].items():
            require(
                replace or name not in owners,
                f"merge.runs: {name} is in {owners.get(name, [''])[0]} and in {folder}; merge.replace=true takes the last one's",
            )
            require(
                name not in steps or part["step"] == steps[name] or (replace and part["step"] > steps[name]),
                f"merge.runs: {name} in {folder} has made {part['step']} of {steps.get(name)} steps: let its run finish first",
            )
            owners[name] = folder, run
            for kind in part["files"]:
                part_file(folder, run, name, kind)
    require(sorted(owners) == sorted(steps), f"merge.runs: the model has {', '.join(steps)}, the runs have {', '.join(owners)}")
    before = read_run(target)
    require(
        before is None or (again and before.get("merged_from") == sorted(map(str, folders))),
        f"{target} already holds a checkpoint: remove it or set folder= to another one",
    )
    return {name: owners[name] for name in steps}


def merge(owners: dict[str, tuple[Path, dict[str, Any]]], target: Path, identity: dict[str, Any]) -> None:
    """Joins parts of different runs, as `check_merge` found them, into one checkpoint, to the bit."""
    top = target / "checkpoint"
    top.mkdir(parents=True, exist_ok=True)
    runs = [run for _, run in owners.values()]
    total = sum(run["parts"][name]["step"] for name, (_, run) in owners.items())
    temporary = top / f"{total:09d}.tmp"
    for leftover in (temporary.with_suffix(""), temporary):  # of a merge that was cut off
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    entries = {}
    for name, (folder, run) in owners.items():
        files = {}
        for kind in run["parts"][name]["files"]:
            source = part_file(folder, run, name, kind)
            shutil.copyfile(source, temporary / source.name)
            files[kind] = described(temporary / source.name)
        entries[name] = {**run["parts"][name], "files": files}
    machines = [machine for run in runs for machine in run["machines"]]
    description = {
        "identity": identity,
        "data": runs[0]["data"],
        "commit": runs[0]["commit"],
        "machines": [machine for index, machine in enumerate(machines) if machine not in machines[:index]],
        "merged_from": sorted({str(folder) for folder, _ in owners.values()}),
    }
    commit_generation(target, temporary, {**description, "parts": entries})
