"""Turns finished runs into records, which the report is drawn from.

    python -m experiments.collect runs/*

Each run knows which tables asked for it (tables.json) and what was scored (results.json). Records are only added or replaced:
a row is what one seed scored for one setting of one table under one protocol. What is missing, damaged or of another kind is
refused in a sentence, and then nothing is written. experiments/records/ then holds

    <table>.csv      a row per score
    levels.csv       a row per run and table: the held-out loss at every level
    curves.csv       a row per run and table: the held-out loss during training
    protocols.json   what each protocol's digest stands for
    samples/         for the lowest seed of each setting, its first images as a PNG

`guidance` is the sampler's dial of a score of what was drawn: guidance for images, temperature for text. It is empty where
nothing was drawn, or where a score is of several temperatures together.
"""

import argparse
import csv
import io
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import checkpoint
import pipeline
from config import SettingError, digest, require, without_later
from files import write_atomically
from sampler import is_whole, load_arrays
from text_scores import at_matched_entropy
from train import read_metrics

RECORDS = Path(__file__).resolve().parent / "records"
FLOOR = "floor"  # the setting under which the scores of real images and of held-out text stand
IMAGES = 20  # of each setting, with the same seeds and labels for all
IMAGES_GUIDANCE = 1.0  # at which they are drawn: every table has it

KEY = ("table", "scale", "paper", "match", "setting", "seed", "metric", "guidance", "protocol")
COLUMNS = (*KEY, "value", "seconds", "command", "commit", "hardware")
SERIES = ("table", "scale", "paper", "match", "setting", "seed", "protocol")
SERIES_COLUMNS = {"levels": (*SERIES, "levels", "loss"), "curves": (*SERIES, "step", "loss")}
# Kinds of result of which every score is a row, and what its name begins with there where another kind has the same.
WHOLE = {"classification": "", "label_denoising": "denoising_", "training_cost": "", "likelihood": "", "next_token": ""}
WHOLE |= {"embeddings": "embedding_", "generated_text": "", "matched_text": "", "heldout_text": ""}
REAL = ("floor", "heldout_text")  # kinds of result that are of real data, without a model
METRICS = ("frechet_inception_distance", "precision", "recall", "label_accuracy", "nearest_train_distance_mean")

# Typed to say where and how loudly a run works, not what it is; or columns of their own.
PLACE = ("experiment", "scale", "paper", "match", "seed", "out", "folder", "device", "threads", "mode", "log", "data.cache")
PLACE += ("data.path",)  # what is there, the fingerprint in the protocol says
PLACE += ("train.log_every", "train.checkpoint_every", "train.sample_every", "train.evaluate_every", "sampler.batch_size")
# What a protocol leaves out: what a table varies, what follows from it, and what changes rounding at most.
VARIED = ("trained.method", "trained.partition", "trained.seed", "trained.train.block_order", "trained.train.block_probability")
VARIED += ("trained.train.match", "trained.train.blocks", "trained.train.precision", "trained.data.path")
VARIED += ("steps_trained", "checksums", "visits", "environment", "machines", "trained_at", "features_device")
VARIED += ("sampler.batch_size",)
# By table, what its settings differ in without typing it: what their methods and objectives do not use, and what a preset sets.
_LABELS = ("trained.objective", "trained.model.label_token", "trained.model.adaLN", "trained.model.share", "sampler")
_RELEASED = ("trained.model.mlp_ratio", "trained.model.dropout", "weights", "trained.train.learning_rate")
_RELEASED += ("trained.train.schedule", "trained.train.warmup_steps", "trained.train.weight_decay")
VARIED_IN = {"classification": (*_LABELS, *_RELEASED), "noprop": _LABELS, "target_table": _LABELS, "speed": _LABELS}
_TEXT = ("text_ar", "text_recurrent", "lm1b_ar", "owt_ar", "lm1b_recurrent")
VARIED_IN |= dict.fromkeys(_TEXT, ("trained.objective", "trained.train.steps"))


def is_under(key: str, names: Iterable[str]) -> bool:
    """Returns whether a dotted key is one of the names or lies inside one."""
    return any(key == name or key.startswith(name + ".") for name in names)


def setting_of(overrides: list[str]) -> str:
    """Returns what makes a run one setting of its table: what was typed or swept, without where it ran, in order of the keys.

    A sweep writes True where one types true.
    """
    pairs = [re.sub("=(True|False)$", lambda found: found[0].lower(), override).partition("=") for override in overrides]
    return " ".join(sorted(f"{key}={value}" for key, _, value in pairs if not is_under(key.lstrip("+~"), PLACE)))


def protocol_of(result: dict[str, Any], setting: str, table: str) -> dict[str, Any]:
    """Returns how a result was measured and on what it was trained, flat, without what the setting or its table varies."""
    typed = [pair.partition("=")[0] for pair in setting.split()]
    varied = [*VARIED, *VARIED_IN.get(table, ()), *typed, *(f"trained.{key}" for key in typed)]
    if result["kind"] in REAL:
        varied += ["trained", "trained_on", "weights"]
    measured = result["protocol"]
    protocol = {
        **measured,
        "trained": without_later(measured["trained"]),
        "trained_on": {"precision": measured["trained_on"]["precision"]},
    }
    return {key: value for key, value in flatten(protocol).items() if not is_under(key, varied)}


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


def scores_of(result: dict[str, Any]) -> dict[tuple[str, Any], float | None]:
    """Returns the scores of a result of which every one is a row, by metric and temperature, with what it has by step and block.

    A bound is no likelihood and has a name of its own.
    """
    kind, prefix = result["kind"], WHOLE[result["kind"]]
    dial = result["protocol"]["sampler"]["temperature"] if kind == "generated_text" else ""
    found = {f"{prefix}{name}": value for name, value in result["scores"].items()}
    if result["title"] == "bound":
        found["bits_per_character_bound"] = found.pop("bits_per_character")
    found |= {f"accuracy_stage_{row['stage']}": row["accuracy"] for row in result.get("stages", ())}
    for row in result.get("blocks", ()):
        for name in ("nats", "accuracy", "cross_entropy", "cross_entropy_on_other_images"):
            found[f"{prefix}{name}_block_{row['block']}"] = row[name]
    return {(metric, dial): value for metric, value in found.items()}


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns results that are read off a language model's others, so that models of different kinds can be compared.

    `next_token`: bits per character as a next-token model, the likelihood of a plain model and the cross-entropy at sigma_max of
    token diffusion. `matched_text`: known words at the entropy of held-out text, from the model's own temperatures, where these
    reach it: samples that are less varied look better. Generated text also gets its distinct-2 over that of held-out text.
    """
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_kind.setdefault(result["kind"], []).append(result)
    found = []
    for result in by_kind.get("likelihood", ()):
        exact = "bits_per_character" if result["title"] == "likelihood" else "bits_per_character_sigma_max"
        own = {key: value for key, value in result["protocol"].items() if key not in ("draws", "intervals")}
        protocol = {**own, "metric": "next-token cross-entropy: exact, or at sigma_max"}
        scores = {"next_token_bits": result["scores"].get(exact)}
        found.append({"kind": "next_token", "title": "next token", "scores": scores, "protocol": protocol})
    drawn = by_kind.get("generated_text", [])
    if drawn and "entropy" in drawn[0]["scores"]:
        real = by_kind["heldout_text"][-1]["scores"]
        for result in drawn:
            ours = result["scores"]["distinct_2"]
            result["scores"]["distinct_2_ratio"] = ours / real["distinct_2"] if ours and real["distinct_2"] else None
        entropies, known = ([result["scores"][name] for result in drawn] for name in ("entropy", "known_words"))
        scores = {}
        if None not in (*entropies, *known, real["entropy"]):
            scores["known_words_matched"] = at_matched_entropy(entropies, known, real["entropy"])
        temperatures = [result["protocol"]["sampler"]["temperature"] for result in drawn]
        sampler = {**drawn[0]["protocol"]["sampler"], "temperature": temperatures}
        protocol = {**drawn[0]["protocol"], "sampler": sampler}
        found.append({"kind": "matched_text", "title": "matched", "scores": scores, "protocol": protocol})
    return found


class Records:
    """The records of a folder, read, added to and written again; nothing is changed on the disk before that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series = {name: read_records(folder / f"{name}.csv", columns) for name, columns in SERIES_COLUMNS.items()}
        # Other scripts keep records of other columns in the same folder.
        paths = [path for path in sorted(folder.glob("*.csv")) if path.stem not in self.series and columns_of(path) == COLUMNS]
        self.scores = {path.stem: read_records(path) for path in paths}
        self.protocols = read_protocols(folder, [*self.scores.values(), *self.series.values()])
        self.images: dict[str, Image.Image] = {}  # to be written, by name

    def add(self, folder: Path) -> int:
        """Adds a run's results for every table that asked for it; returns how many rows.

        Raises:
            SettingError: a file of the run is missing or damaged, or a file of the records has a table's name.
        """
        tables = pipeline.read_tables(folder)
        if not tables:
            return 0
        results, run = pipeline.read_results(folder), checkpoint.read_run(folder)
        require(run is not None, f"{folder} is scored but holds no checkpoint: put that back, or leave the run out")
        count = 0
        for asked in tables:
            own = [result for result in results if asked["question"] in result["questions"]]
            require(
                len(own) > 0,
                f"{folder / 'results.json'} lacks what experiment={asked['experiment']} asked for: repeat its command",
            )
            for result in [*own, *compared(own)]:
                count += self.add_result(folder, asked, result, train_seconds(run))
        return count

    def add_result(self, folder: Path, asked: dict[str, Any], result: dict[str, Any], seconds: int) -> int:
        """Adds one result for one table; returns how many rows."""
        setting = setting_of(asked["overrides"])
        if result["kind"] == "classification":  # a run that predicts in several numbers of steps is a setting for each
            steps = result["protocol"].get("sampler", {}).get("steps")
            setting = re.sub(r"eval\.label_steps=\[.*?\]", f"eval.label_steps=[{steps}]", setting)
        protocol = protocol_of(result, setting, asked["experiment"])
        key = digest(protocol)
        self.protocols[key] = protocol
        common = {
            "table": asked["experiment"],
            **{name: asked[name] for name in ("scale", "paper", "match")},
            "setting": setting,
            "seed": result["protocol"]["trained"]["seed"],
            "protocol": key,
            "seconds": seconds,
            "command": command_of("main.py", asked["overrides"]),
            "commit": short_commit(result["protocol"]["trained_at"]),
            "hardware": hardware_of(result),
        }
        if result["kind"] == "heldout_loss":
            found = {("heldout_loss", ""): result["scores"]["integrated"]}
            self.add_series("levels", common, levels=result["by_level"]["levels"], loss=result["by_level"]["loss"])
            # Points of another protocol, from before an evaluation setting changed, are none of this result's curve.
            same = result["protocol"].items()
            rows = [row for row in read_metrics(folder / "heldout.jsonl") if row.get("protocol", {}).items() <= same]
            if rows:
                self.add_series("curves", common, step=[r["step"] for r in rows], loss=[r["integrated"] for r in rows])
        elif result["kind"] == "samples":
            guidance = result["protocol"]["sampler"]["guidance"]
            found = {(name, guidance): result["scores"][name]["mean"] for name in METRICS if name in result["scores"]}
            if guidance == IMAGES_GUIDANCE:
                self.add_images(folder / result["sets"][0]["images"], common)
        elif result["kind"] == "floor":
            found = {(name, ""): result["scores"][name] for name in METRICS}
        elif result["kind"] in WHOLE:
            found = scores_of(result)
        else:
            return 0
        if result["kind"] in REAL:
            common |= {"setting": FLOOR, "seed": result["protocol"].get("seed", 0), "seconds": ""}
        rows = [
            {**common, "metric": metric, "guidance": guidance, "value": f"{value:.6g}"}
            for (metric, guidance), value in found.items()
            if value is not None
        ]
        replace_rows(self.rows_of(asked["experiment"]), rows, KEY)
        return len(rows)

    def rows_of(self, table: str) -> list[dict[str, Any]]:
        """Returns a table's rows, to be added to."""
        path = self.folder / f"{table}.csv"
        require(
            table in self.scores or not (table in self.series or path.exists()),
            f"experiment={table} would replace {path}, which is not a table's records: move it away, or rename the overlay",
        )
        return self.scores.setdefault(table, [])

    def add_series(self, name: str, common: dict[str, Any], **values: list[float]) -> None:
        """Adds a row of numbers in order, separated by spaces."""
        numbers = {key: " ".join(f"{value:.5g}" for value in series) for key, series in values.items()}
        replace_rows(self.series[name], [{**{key: common[key] for key in SERIES}, **numbers}], SERIES)

    def add_images(self, folder: Path, common: dict[str, Any]) -> None:
        """Keeps a setting's first images beside each other, without enlarging them, for the lowest seed alone."""
        name = image_name(common)
        seeds = [int(row["seed"]) for row in self.scores.get(common["table"], []) if row_is(row, common, SERIES[:5])]
        if seeds and min(seeds) < common["seed"]:
            return
        path = folder / "samples.npz"
        require(
            is_whole(path),
            f"{path}, which the records show, is missing or damaged: move the run's results.json away and repeat its command",
        )
        images, _ = load_arrays(path)
        strip = np.concatenate(list(images[:IMAGES].transpose(0, 2, 3, 1)), axis=1)  # (H, IMAGES W, C)
        self.images[name] = Image.fromarray(strip.squeeze(-1) if strip.shape[-1] == 1 else strip)

    def write(self) -> None:
        """Writes all records, in an order of their own, so that git shows what was added.

        Raises:
            SettingError: the disk does not take them.
        """
        used = {row["protocol"] for rows in (*self.scores.values(), *self.series.values()) for row in rows}
        kept = {key: self.protocols[key] for key in sorted(used)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "protocols.json", json.dumps(kept, indent=1) + "\n")  # before the rows that name them
            for name, rows in {**self.scores, **self.series}.items():
                rows.sort(key=lambda row: [str(row[key]) for key in KEY if key in row])
                if rows:
                    write_rows(self.folder / f"{name}.csv", rows, SERIES_COLUMNS.get(name, COLUMNS))
            for name, image in self.images.items():
                (self.folder / "samples").mkdir(exist_ok=True)
                image.save(self.folder / "samples" / name, optimize=True)
        except OSError as error:
            raise SettingError(f"the records in {self.folder} cannot be written ({error.strerror}): set --records") from None


def image_name(row: dict[str, Any]) -> str:
    """Returns the file in which a setting's first images are kept."""
    setting = digest([row["setting"], str(IMAGES_GUIDANCE)], 8)
    return "_".join([row["table"], row["scale"], row["paper"], row["match"], setting]) + ".png"


def command_of(script: str, overrides: Iterable[str]) -> str:
    """Returns the command that repeats a run, without where its files lie and how it logs."""
    return f"python {script} " + shlex.join(own for own in overrides if not own.startswith(("out=", "log.")))


def train_seconds(run: Mapping[str, Any]) -> int:
    """Returns the seconds of all steps of a run, of its checkpoint's run.json."""
    return round(sum(part["seconds"] for part in run["parts"].values()))


def hardware_of(result: dict[str, Any]) -> str:
    """Returns what a result's model was trained on."""
    machine = result["protocol"]["trained_on"]
    return f"{machine['device']}: {machine['cpu']}, {machine['threads']} threads, {machine['precision']}"


def short_commit(commit: str | None, length: int = 10) -> str:
    """Returns the beginning of a commit's name and whether files were changed beside it; nothing outside git."""
    name, dash, changed = (commit or "").partition("-")
    return name[:length] + dash + changed


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file by column name."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def columns_of(path: Path) -> tuple[str, ...]:
    """Returns the columns of a CSV file; of another file, what is in their place."""
    with open(path, newline="", errors="replace") as file:
        return tuple(file.readline().rstrip("\r\n").split(","))


def read_records(path: Path, columns: tuple[str, ...] = COLUMNS) -> list[dict[str, str]]:
    """Returns the rows of a file of records; none where there is no file.

    Raises:
        SettingError: it has other columns, or a row that is not whole.
    """
    if not path.exists():
        return []
    require(columns_of(path) == columns, f"{path} does not have the columns {','.join(columns)}: put back the file that has")
    try:
        rows = read_rows(path)
        whole = path.read_bytes().endswith(b"\n") and all(None not in row and None not in row.values() for row in rows)
        [(int(row.get("seed", 0)), float(row.get("value", 0))) for row in rows if whole]
    except (ValueError, csv.Error):
        whole = False
    require(whole, f"{path} has a row that is cut off or damaged: put back the file that was whole")
    return rows


def read_protocols(folder: Path, tables: Iterable[list[dict[str, str]]]) -> dict[str, dict[str, Any]]:
    """Returns what the protocols' digests stand for, those of some tables' rows among them.

    Raises:
        SettingError: protocols.json is damaged, or lacks one of these.
    """
    path = folder / "protocols.json"
    try:
        protocols = json.loads(path.read_text()) if path.exists() else {}
        lacking = sorted({row["protocol"] for rows in tables for row in rows} - protocols.keys())
    except (ValueError, AttributeError) as error:
        raise SettingError(f"{path} is not a list of protocols ({error}): put back the file that was whole") from None
    require(not lacking, f"{path} lacks {', '.join(lacking[:3])}, which rows beside it name: put back the file that has them")
    return protocols


def write_rows(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Writes a CSV file of these columns, in one move."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def row_is(row: dict[str, Any], other: dict[str, Any], columns: Iterable[str]) -> bool:
    """Returns whether two rows agree in some columns, read from a file or not."""
    return all(str(row[column]) == str(other[column]) for column in columns)


def replace_rows(rows: list[dict[str, Any]], new: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Adds rows in place; one with the same key takes the earlier one's place."""
    keys = {tuple(str(row[column]) for column in key) for row in new}
    rows[:] = [row for row in rows if tuple(str(row[column]) for column in key) not in keys] + new


def main() -> None:
    """Adds the runs that were named and says how many rows they gave."""
    parser = argparse.ArgumentParser(description="Turn finished runs into records.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        for folder in arguments.runs:
            require(folder.exists(), f"{folder} is not there: name the folders of runs")
        records = Records(arguments.records)
        counts = {folder: records.add(folder) for folder in arguments.runs}
        found = sum(count > 0 for count in counts.values())
        require(found > 0, "no table has scores in what was named: name runs of a command with experiment= that finished")
        records.write()
    except SettingError as error:
        sys.exit(f"error: {error}")
    print(f"{sum(counts.values())} rows of {found} runs in {arguments.records}")
    left = [str(folder) for folder, count in counts.items() if count == 0 and (folder / "checkpoint").is_dir()]
    if left:
        print(f"no table has scores in {', '.join(left)}")


if __name__ == "__main__":
    main()
