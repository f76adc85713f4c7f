"""Draws experiments/REPORT.md, its pictures and the README's tables from the records, and from nothing else.

    python -m experiments.report

Nothing in the report is typed in by hand, its verdicts included; the same records give the same bytes. The paper's values come
from experiments/paper_tables.csv. Scores whose protocols differ never share a column.
"""

import argparse
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import plots
from experiments import conversion, edges
from experiments.collect import FLOOR, RECORDS, image_name, read_rows

ROOT = Path(__file__).resolve().parent
README = ROOT.parent / "README.md"
MARKS = ("<!-- drawn by python -m experiments.report -->", "<!-- end of what is drawn -->")
RESOLVED = 2.0  # standard errors beyond which a paired difference counts as seen
FID = "frechet_inception_distance"
BESIDE = ("recall", "label_accuracy", "nearest_train_distance_mean")  # shown at the guidance of the best FID

Row = dict[str, str]
Values = dict[str, dict[int, float]]  # setting -> seed -> value


@dataclass(frozen=True)
class Table:
    """One table: what it varies, and which of the paper's rows is which of our settings.

    Attributes:
        reference: the setting against which differences are taken.
        paper: returns the setting of a row of paper_tables.csv, None for a row of another table.
    """

    name: str
    title: str
    about: str
    reference: str
    paper: Callable[[Row], str | None] = lambda row: None


def _partition(row: Row) -> str | None:
    if row["table"] != "partition" or row["layer_distribution"] not in ("", "4-4-4"):
        return None
    return f"partition={row['partition']} train.block_probability=uniform"


def _layers(row: Row) -> str | None:
    if row["table"] != "partition" or not row["layer_distribution"]:
        return None
    return f"partition.layers=[{row['layer_distribution'].replace('-', ',')}] partition={row['partition']}"


TABLES = (
    Table(
        "main",
        "End to end, blocks, and one shallow network",
        "`shallow` is the control that the paper lacks: one network of a block's depth over all levels, trained as many times "
        "longer as there are blocks, so that its arithmetic, memory and sampling cost are those of the blocks.",
        "method=end_to_end",
        lambda row: f"method={row['method']}" if row["table"] == "main" else None,
    ),
    Table(
        "num_blocks",
        "Number of blocks",
        "The same depth cut into more blocks; one block is end to end.",
        "partition.num_blocks=1",
        lambda row: f"partition.num_blocks={row['num_blocks']}" if row["table"] == "num_blocks" else None,
    ),
    Table(
        "overlap",
        "Overlap of the training intervals",
        "The exponent by which each block's interval is widened at both ends in log sigma.",
        "partition.overlap=0",
        lambda row: f"partition.overlap={row['overlap']}" if row["table"] == "overlap" else None,
    ),
    Table(
        "partition",
        "Where the levels are cut, and how often each block is trained",
        "The paper's `uniform` is equal in log sigma by its appendix E.6, linear in sigma by its section 3.3; both are here. "
        "`block_probability=mass` gives each block steps in proportion to its share of the training distribution.",
        "partition=equi_probability train.block_probability=uniform",
        _partition,
    ),
    Table(
        "layers",
        "Layers per block",
        "The noisiest block's layers first.",
        "partition.layers=[4,4,4] partition=equi_probability",
        _layers,
    ),
    Table(
        "sampling_steps",
        "Sampling steps",
        "A step of end to end evaluates all layers, a step of 3 blocks a third of them: 3, 6 and 17 steps end to end cost as "
        "much as 9, 18 and 50 with 3 blocks. The held-out loss does not depend on the steps.",
        "method=diffusion_blocks sampler.schedule=karras sampler.steps=50",
    ),
    Table(
        "solver",
        "Solver and spacing",
        "Not a table of the paper. 25 nodes of Heun cost as many evaluations as 49 of Euler. The held-out loss does not depend "
        "on the sampler.",
        "sampler.name=euler sampler.schedule=karras sampler.steps=49",
    ),
    Table(
        "weighting",
        "Weight of the loss over the levels",
        "The paper calls the weight crucial and shows no table. The held-out loss is EDM's for every setting.",
        "objective.weighting=edm partition=equi_probability",
    ),
)


class Column(NamedTuple):
    """What shares a column: one metric at one guidance under one protocol, against one split."""

    metric: str
    guidance: str
    protocol: str
    split: str

    @property
    def compared(self) -> bool:
        """Whether differences to the reference stand beside it."""
        return self.metric in ("heldout_loss", FID)


class Group(NamedTuple):
    """What shares a subtable: one scale with one version's settings."""

    scale: str
    paper: str
    match: str

    @property
    def title(self) -> str:
        return f"{self.scale}, settings of {self.paper}" + ("" if self.match == "layer_work" else f", matched by {self.match}")


SAMPLING = ("sampling_steps", "solver")  # tables that vary the sampler alone, so that their held-out losses are one
# What the README shows of the report.
README_TABLES = [(name, Group("digits", "v4", "layer_work")) for name in ("main", "num_blocks")]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def natural(setting: str) -> list[object]:
    """Returns a key that sorts settings with their numbers in order."""
    return [
        (0, float(part), "") if re.fullmatch(r"\d+\.?\d*", part) else (1, 0.0, part) for part in re.split(r"([\d.]+)", setting)
    ]


def in_order(settings: Iterable[str], reference: str) -> list[str]:
    """Returns settings sorted; a reference without a number in it comes first."""
    numbered = re.search(r"\d", reference)
    return sorted(settings, key=lambda setting: (numbered is None and setting != reference, natural(setting)))


def spread(values: Iterable[float]) -> float | None:
    """Returns the sample standard deviation; None for fewer than two values."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else None


def paired(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, float | None, int] | None:
    """Returns mean, standard error and number of the differences ours - theirs over the seeds that both have."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    deviation = spread(differences)
    return statistics.fmean(differences), deviation and deviation / math.sqrt(len(differences)), len(differences)


def pooled_spread(values: Values) -> float | None:
    """Returns the standard deviation over seeds, pooled over the settings that have several."""
    variances = [(len(seeds) - 1, statistics.variance(seeds.values())) for seeds in values.values() if len(seeds) > 1]
    return math.sqrt(sum(n * v for n, v in variances) / sum(n for n, _ in variances)) if variances else None


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def with_spread(seeds: dict[int, float]) -> str:
    """Returns `mean ± standard deviation`."""
    deviation = spread(seeds.values())
    return number(statistics.fmean(seeds.values())) + ("" if deviation is None else f" ± {deviation:.2g}")


def means(values: Values) -> dict[str, float]:
    return {setting: statistics.fmean(seeds.values()) for setting, seeds in values.items()}


def verdict(name: str, ours: Values, paper: dict[str, float]) -> str:
    """Says whether a score orders the settings as the paper's FID does; lower is better for both.

    A pair of settings is seen if the mean of its differences by seed is beyond twice its standard error.
    """
    average = means(ours)
    best = min(average, key=average.get)
    span, noise = max(average.values()) - min(average.values()), pooled_spread(ours)
    effect = f"the settings span {number(span)}" + (f", the seeds' spread is {number(noise)}" if noise else ", there is one seed")
    common = [setting for setting in ours if setting in paper]
    if len(common) < 2:
        return f"{name}: best is `{best}`; {effect}; the paper gives nothing to compare."
    seen = {True: 0, False: 0}
    unseen = 0
    for one, other in itertools.combinations(common, 2):
        difference = paired(ours[one], ours[other])
        if difference is None or difference[1] is None or abs(difference[0]) <= RESOLVED * difference[1]:
            unseen += 1
        else:
            seen[(difference[0] < 0) == (paper[one] < paper[other])] += 1
    pairs = unseen + sum(seen.values())
    if not seen[True] and not seen[False]:
        word = "the paper's trend is not resolved"
    elif not seen[False]:
        word = "the paper's trend appears" if seen[True] > pairs / 2 else "the paper's trend appears in part"
    elif not seen[True]:
        word = "the paper's trend is reversed" if seen[False] > pairs / 2 else "the paper's trend does not appear"
    else:
        word = "the paper's trend appears in part" if seen[True] > seen[False] else "the paper's trend does not appear"
    best_common = min(common, key=average.get)
    return (
        f"{name}: **{word}**. Of {pairs} pairs of settings {seen[True]} differ as in the paper, {seen[False]} the other way, "
        f"{unseen} by less than {RESOLVED:g} standard errors; of these our best is `{best_common}`, the paper's "
        f"`{min(common, key=paper.get)}`; {effect}."
    )


def beyond_reference(ours: Values, reference: str) -> str:
    """Names the settings whose difference to the reference is seen, lower or higher."""
    if reference not in ours:
        return ""
    seen = []
    for setting in in_order(ours.keys() - {reference}, reference):
        difference = paired(ours[setting], ours[reference])
        if difference is not None and difference[1] is not None and abs(difference[0]) > RESOLVED * difference[1]:
            seen.append(f"`{setting}` ({difference[0]:+.3g}, {difference[2]} seeds)")
    return f" Seen to differ from `{reference}`: {', '.join(seen) or 'none'}."


# ---------------------------------------------------------------------------------------------------------------------
# From records to tables


def columns_of(rows: list[Row], protocols: dict[str, dict[str, object]]) -> dict[Column, Values]:
    """Returns the scores of a group by column, setting and seed, without the floor; `protocols` by digest."""
    found: dict[Column, Values] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["setting"] != FLOOR:
            column = Column(row["metric"], row["guidance"], row["protocol"], str(protocols[row["protocol"]]["split"]))
            found[column][row["setting"]][int(row["seed"])] = float(row["value"])
    return {column: dict(values) for column, values in sorted(found.items())}


def best_guidance(columns: dict[Column, Values]) -> str | None:
    """Returns the guidance at which the mean FID over all settings is lowest, the same for every setting."""
    scores = {
        column.guidance: statistics.fmean(means(values).values()) for column, values in columns.items() if column.metric == FID
    }
    return min(scores, key=scores.get) if scores else None


def shown_columns(columns: dict[Column, Values]) -> list[tuple[str, Column]]:
    """Returns (heading, column) of what a table shows: held-out loss, FID at guidance 1 and at the best, and what goes beside."""
    best = best_guidance(columns)
    shown = [("held-out loss", column) for column in columns if column.metric == "heldout_loss"]
    for guidance in sorted({"1.0", best} - {None}):
        where = f"at guidance {float(guidance):g}" + (" (best)" if guidance == best else "")
        shown += [(f"FID, {column.split} split, {where}", column) for column in columns if column[:2] == (FID, guidance)]
    for metric in BESIDE:
        heading = {"nearest_train_distance_mean": "distance to train"}.get(metric, metric.replace("_", " "))
        shown += [(heading, column) for column in columns if column[:2] == (metric, best)]
    return shown


def paper_columns(table: Table, paper: list[Row]) -> dict[str, dict[str, float]]:
    """Returns the paper's FIDs by heading and setting."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in paper:
        setting = table.paper(row)
        if setting is not None and row["metric"] == "fid":
            found[f"{row['version']}: {row['data']}, {row['split']} FID"][setting] = float(row["value"])
    return dict(found)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def group_table(
    table: Table,
    columns: dict[Column, Values],
    shown: list[tuple[str, Column]],
    floor: dict[tuple[str, str], float],
    paper: dict[str, dict[str, float]],
) -> str:
    """Returns a group's table: settings down, the paper's values and ours across, the floor last.

    Args:
        shown: (heading, column) of ours.
        floor: by metric and split.
        paper: heading -> setting -> FID.
    """
    settings = in_order({setting for values in columns.values() for setting in values}, table.reference)
    known = [heading for heading, values in paper.items() if any(setting in values for setting in settings)]
    header = ["setting", *known, "seeds"]
    for heading, column in shown:
        header += [heading, "difference"] if column.compared else [heading]
    rows = []
    for setting in settings:
        seeds = {seed for _, column in shown for seed in columns[column].get(setting, {})}
        theirs = [paper[heading].get(setting) for heading in known]
        cells = [f"`{setting}`", *("" if value is None else f"{value:.2f}" for value in theirs), str(len(seeds))]
        for _, column in shown:
            values = columns[column]
            cells.append(with_spread(values[setting]) if setting in values else "")
            cells += [difference_cell(values, setting, table.reference)] if column.compared else []
        rows.append(cells)
    cells = ["floor: real images", *[""] * len(known), ""]
    for _, column in shown:
        cells += [number(floor.get((column.metric, column.split)))] + [""] * column.compared
    return markdown(header, [*rows, cells])


def difference_cell(values: Values, setting: str, reference: str) -> str:
    """Returns the difference to the reference by seed, `mean ± standard error`; empty where there is none."""
    if setting == reference or setting not in values or reference not in values:
        return ""
    difference = paired(values[setting], values[reference])
    if difference is None:
        return ""
    mean, error, _ = difference
    return f"{mean:+.3g}" + ("" if error is None else f" ± {error:.2g}")


# ---------------------------------------------------------------------------------------------------------------------
# The report


class Report:
    """Writes a report's text and pictures; `text` collects the lines."""

    def __init__(self, records: Path, out: Path) -> None:
        self.records, self.out = records, out
        self.pictures = out / "report"
        self.paper = read_rows(ROOT / "paper_tables.csv")
        self.levels, self.curves = (self.series(name) for name in ("levels", "curves"))
        self.protocols = json.loads((records / "protocols.json").read_text())
        self.text: list[str] = []
        self.readme: list[str] = []

    def series(self, name: str) -> list[Row]:
        path = self.records / f"{name}.csv"
        return read_rows(path) if path.exists() else []

    def write(self) -> Path:
        """Writes REPORT.md and report/*.png, returns the path of the former, and leaves the README's part in `readme`."""
        self.pictures.mkdir(parents=True, exist_ok=True)
        for old in self.pictures.glob("*.png"):
            old.unlink()
        self.text.append((ROOT / "report_head.md").read_text())
        for table in TABLES:
            path = self.records / f"{table.name}.csv"
            if path.exists():
                self.table(table, read_rows(path))
        self.text += edges.section(self.series("edges"))
        self.text += conversion.section({study: self.series(f"studies/{study}") for study in conversion.KEYS})
        path = self.out / "REPORT.md"
        path.write_text("\n".join(self.text))
        return path

    def into_readme(self, text: str) -> str:
        """Returns a README with the tables and pictures of README_TABLES between its two marks."""
        before, _, rest = text.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        return f"{before}{MARKS[0]}\n" + "\n".join(self.readme) + f"{MARKS[1]}{after}"

    def table(self, table: Table, rows: list[Row]) -> None:
        """Adds a table with a part for each scale and version."""
        self.text += [f"## {table.title}\n", f"{table.about}\n"]
        paper = paper_columns(table, self.paper)
        groups: dict[Group, list[Row]] = defaultdict(list)
        for row in rows:
            groups[Group(row["scale"], row["paper"], row["match"])].append(row)
        for group, own in sorted(groups.items()):
            self.group(table, group, own, paper)

    def group(self, table: Table, group: Group, rows: list[Row], paper: dict[str, dict[str, float]]) -> None:
        """Adds one scale's table, verdicts and pictures."""
        columns = columns_of(rows, self.protocols)
        shown = shown_columns(columns)
        floor = {
            (row["metric"], str(self.protocols[row["protocol"]]["split"])): float(row["value"])
            for row in rows
            if row["setting"] == FLOOR
        }
        self.text += [f"### {group.title}\n", group_table(table, columns, shown, floor, paper)]
        best = best_guidance(columns)
        compared = next((values for name, values in paper.items() if name.startswith(f"{group.paper}: cifar10, test")), {})
        for column, values in columns.items():
            if column.metric == "heldout_loss" and table.name not in SAMPLING:
                self.text.append(f"- {verdict('Held-out loss', values, compared)}{beyond_reference(values, table.reference)}")
            elif column[:2] == (FID, best):
                name = f"FID at guidance {float(best):g}"
                self.text.append(f"- {verdict(name, values, compared)}{beyond_reference(values, table.reference)}")
        self.text.append("")
        protocols = sorted({f"{heading} `{column.protocol}`" for heading, column in shown})
        hardware = sorted({row["hardware"] for row in rows})
        example = next(row["command"] for row in rows if row["setting"] != FLOOR)
        where = f"`{example}` on {'; '.join(hardware)}"
        self.text.append(f"<sub>One of the runs: {where}. Protocols (records/protocols.json): {', '.join(protocols)}.</sub>\n")
        self.settings_plot(table, group, columns, best, paper)
        if (table.name, group) in README_TABLES:
            test = {heading: values for heading, values in paper.items() if heading == f"{group.paper}: cifar10, test FID"}
            self.readme += [
                f"**{table.title}** ({group.title})\n",
                group_table(table, columns, [item for item in shown if item[1].compared], floor, test),
                f"![{table.title}](experiments/report/{picture_name(table, group, 'settings')})\n",
            ]
        self.levels_plot(table, group)
        self.curves_plot(table, group)
        self.image_rows(table, group, rows)

    def picture(self, table: Table, group: Group, kind: str, caption: str) -> Path:
        """Adds a picture to the text and returns where it is to be written."""
        name = picture_name(table, group, kind)
        self.text.append(f"![{caption}](report/{name})\n\n{caption}\n")
        return self.pictures / name

    def settings_plot(
        self, table: Table, group: Group, columns: dict[Column, Values], best: str | None, paper: dict[str, dict[str, float]]
    ) -> None:
        """Draws scores over settings, the paper's FID on an axis of its own."""
        shown = [("held-out loss", values) for column, values in columns.items() if column.metric == "heldout_loss"]
        shown += [(f"FID at guidance {best}", values) for column, values in columns.items() if column[:2] == (FID, best)]
        settings = in_order({setting for _, values in shown for setting in values}, table.reference)
        path = self.picture(
            table, group, "settings", "Our scores (left axes, with the seeds' spread) and the paper's FID (right axes)."
        )
        test = {heading: values for heading, values in paper.items() if "test" in heading}
        plots.plot_settings([line(setting, "\n") for setting in settings], settings, shown, test, path)

    def levels_plot(self, table: Table, group: Group) -> None:
        """Draws each setting's held-out loss over the levels, relative to the reference, mean over seeds."""
        grid, curves = mean_series(self.levels, table, group, "levels", "loss")
        if table.name not in SAMPLING and table.reference in curves and len(curves) > 1:
            caption = f"Held-out loss at each level (mean over seeds), on the right over that of `{table.reference}`."
            path = self.picture(table, group, "levels", caption)
            plots.plot_levels(grid, {line(name): curve for name, curve in curves.items()}, line(table.reference), path)

    def curves_plot(self, table: Table, group: Group) -> None:
        """Draws the held-out loss over the training: of the main table, where the question is whether the baseline is done."""
        if table.name != "main":
            return
        curves = {}
        for setting in sorted({row["setting"] for row in self.curves if row["table"] == table.name}):
            steps, losses = mean_series([row for row in self.curves if row["setting"] == setting], table, group, "step", "loss")
            if losses:
                curves[line(setting)] = (steps / steps[-1], losses[setting])
        if curves:
            caption = "Held-out loss (EMA weights) over the training; all settings do the same arithmetic in layers."
            plots.plot_curves(curves, self.picture(table, group, "curves", caption))

    def image_rows(self, table: Table, group: Group, rows: list[Row]) -> None:
        """Puts the settings' first images below each other."""
        settings = in_order({row["setting"] for row in rows if row["setting"] != FLOOR}, table.reference)
        found = []
        for setting in settings:
            row = {"table": table.name, **group._asdict(), "setting": setting}
            path = self.records / "samples" / image_name(row, 1.0)
            if path.exists():
                found.append((setting, np.asarray(Image.open(path))))
        if found:
            order = ", ".join(f"`{setting}`" for setting, _ in found)
            path = self.picture(table, group, "samples", f"Samples at guidance 1 from the same seeds, from above: {order}.")
            gap = np.full((1, *found[0][1].shape[1:]), 128, np.uint8)
            stacked = np.concatenate([part for _, strip in found for part in (strip, gap)][:-1])
            scale = max(1, 960 // stacked.shape[1])
            Image.fromarray(stacked.repeat(scale, 0).repeat(scale, 1)).save(path, optimize=True)


def picture_name(table: Table, group: Group, kind: str) -> str:
    """Returns the file name of a picture."""
    return f"{table.name}_{group.scale}_{group.paper}_{group.match}_{kind}.png"


def line(setting: str, between: str = ", ") -> str:
    """Returns a setting's values alone."""
    return between.join(pair.partition("=")[2] for pair in setting.split())


def mean_series(rows: list[Row], table: Table, group: Group, x: str, y: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the common x values, and y averaged over seeds by setting, of the group's commonest protocol."""
    own = [row for row in rows if row["table"] == table.name and Group(row["scale"], row["paper"], row["match"]) == group]
    if not own:
        return np.zeros(0), {}
    protocol = statistics.mode(row["protocol"] for row in own)
    series = defaultdict(list)
    for row in own:
        if row["protocol"] == protocol:
            grid = np.array(row[x].split(), float)
            series[row["setting"]].append(np.array(row[y].split(), float))
    return grid, {
        setting: np.mean(values, axis=0) for setting, values in sorted(series.items(), key=lambda item: natural(item[0]))
    }


def main() -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description="Draw the report from the records.")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT, help="folder of REPORT.md (default: %(default)s)")
    arguments = parser.parse_args()
    report = Report(arguments.records, arguments.out)
    print(report.write())
    if arguments.out == ROOT:
        README.write_text(report.into_readme(README.read_text()))


if __name__ == "__main__":
    main()
