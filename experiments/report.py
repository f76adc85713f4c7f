"""Draws experiments/REPORT.md, its pictures and the README's tables from the records, and from nothing else.

    python -m experiments.report

Nothing in the report is typed in by hand, its verdicts included; the same records give the same bytes. The paper's values come
from experiments/paper_tables.csv. Scores whose protocols differ never share a column. Records that are missing or damaged are
refused in a sentence, and the report that is there stays.
"""

import argparse
import itertools
import math
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.special import stdtr

import plots
from config import SettingError, require
from experiments import benchmark, conversion, edges
from experiments.collect import (
    COLUMNS,
    FLOOR,
    RECORDS,
    SERIES_COLUMNS,
    image_name,
    read_protocols,
    read_records,
    read_rows,
    short_commit,
)
from files import write_atomically

ROOT = Path(__file__).resolve().parent
README = ROOT.parent / "README.md"
MARKS = ("<!-- drawn by python -m experiments.report -->", "<!-- end of what is drawn -->")
COST_MARKS = ("<!-- drawn by python -m experiments.report from what experiments.benchmark measured -->", MARKS[1])
RESOLVED = 2.0  # standard errors beyond which a paired difference counts as seen
FID = "frechet_inception_distance"
BEST = "best"  # the guidance with the lowest FID, in the geometric mean over all settings

Row = dict[str, str]
Values = dict[str, dict[int, float]]  # setting -> seed -> value


@dataclass(frozen=True)
class Score:
    """What a table shows of a metric.

    Attributes:
        better: lower | higher, with differences to the reference beside it; "": shown alone.
        at: the sampler's dial, as in the records; BEST for a guidance that is found.
        unit: what a recorded value is multiplied by.
        judged: whether a sentence compares it with the paper's trend.
        series: metric_0, metric_1 ... stand in one cell.
        counted: the same number for every seed, shown without a deviation.
    """

    metric: str
    heading: str
    better: str = ""
    at: str = ""
    unit: float = 1.0
    judged: bool = False
    series: bool = False
    counted: bool = False


IMAGES = (
    Score("heldout_loss", "held-out loss", "lower", judged=True),
    Score(FID, "FID", "lower", at="1.0"),
    Score(FID, "FID", "lower", at=BEST, judged=True),
    Score("recall", "recall", at=BEST),
    Score("label_accuracy", "label accuracy", at=BEST),
    Score("nearest_train_distance_mean", "distance to train", at=BEST),
)
SAMPLED = (replace(IMAGES[0], judged=False), *IMAGES[1:])  # where the sampler alone varies, the held-out losses are one
MEMORY = (
    Score("state_bytes", "state, MiB", unit=2**-20, counted=True),
    Score("activation_bytes", "activations, MiB", unit=2**-20, counted=True),
)
STEP = Score("seconds_per_step", "seconds a step")
LABELS = (
    Score("accuracy", "top-1, %", "higher", unit=100, judged=True),
    Score("top5", "top-5, %", unit=100),
    Score("cross_entropy_at_sigma_max", "cross-entropy at sigma_max"),
    Score("shuffled_accuracy", "top-1 of shuffled images, %", unit=100),
    Score("accuracy_stage", "top-1 after each step or group, %", unit=100, series=True),
    *MEMORY,
    STEP,
)
BY_BLOCK = (
    Score("denoising_nats_block", "nats of the label, by block", series=True),
    Score("denoising_cross_entropy_block", "cross-entropy, by block", series=True),
    Score("denoising_cross_entropy_on_other_images_block", "cross-entropy on other labels' images, by block", series=True),
)
TEXT = (
    Score("next_token_bits", "next-token bits per character", "lower", judged=True),
    Score("bits_per_character_bound", "bits per character, bound", "lower"),
    Score("known_words_matched", "known words at held-out entropy, %", "higher", unit=100, judged=True),
    Score("known_words", "known words, %", at="1.0", unit=100),
    Score("distinct_2_ratio", "distinct-2 over held-out", at="1.0"),
    Score("mauve", "MAUVE", "higher", at="1.0", judged=True),
    Score("perplexity_Llama-2-7b-hf", "perplexity (Llama 2)", "lower", at="1.0"),
    Score("perplexity_gpt2-xl", "perplexity (GPT-2 XL)", "lower", at="1.0"),
    Score("token_layers", "token-layers, millions", unit=1e-6, counted=True),
    *MEMORY,
    Score("seconds", "seconds"),
)
NATS = (
    Score("nats_block", "nats of the bound, by block", series=True),
    Score("embedding_nats_block", "nats that the noisy embedding gives away, by block", series=True),
)
MASKED = (replace(TEXT[1], judged=True), replace(TEXT[2], judged=False), *TEXT[3:], NATS[0])
# The paper's metrics: what they are called, and what is better.
PAPER = {
    "fid": ("FID", "lower"),
    "accuracy": ("top-1, %", "higher"),
    "mauve": ("MAUVE", "higher"),
    "ppl_llama2": ("perplexity (Llama 2)", "lower"),
    "ppl_gpt2xl": ("perplexity (GPT-2 XL)", "lower"),
    "bpc": ("bits per character", "lower"),
    "seconds_per_iteration": ("seconds a step", "lower"),
}


@dataclass(frozen=True)
class Table:
    """One table: what it varies, and which of the paper's rows is which of our settings.

    Attributes:
        reference: the setting against which differences are taken.
        paper: returns the setting of a row of paper_tables.csv, None for a row of another table.
        scores: what is shown.
        metrics: the paper's that are shown.
        against: what of the paper's a trend is compared with: data and metric.
        floor: what is scored as if it came from a model.
        plotted: whether scores are drawn over the settings.
        experiment: whose records these are; "": of the same name.
        settings: which of them are in this table.
    """

    name: str
    title: str
    about: str
    reference: str
    paper: Callable[[Row], str | None] = lambda row: None
    scores: tuple[Score, ...] = IMAGES
    metrics: tuple[str, ...] = ("fid",)
    against: tuple[str, str] = ("cifar10", "fid")
    floor: str = "real images"
    plotted: bool = True
    experiment: str = ""
    settings: Callable[[str], bool] = lambda setting: True

    @property
    def records(self) -> str:
        """The experiment whose records these are."""
        return self.experiment or self.name


def _partition(row: Row) -> str | None:
    if row["table"] != "partition" or row["layer_distribution"] not in ("", "4-4-4"):
        return None
    return f"partition={row['partition']} train.block_probability=uniform"


def _layers(row: Row) -> str | None:
    if row["table"] != "partition" or not row["layer_distribution"]:
        return None
    return f"partition.layers=[{row['layer_distribution'].replace('-', ',')}] partition={row['partition']}"


def _noprop(row: Row) -> str | None:
    if row["table"] != "noprop":
        return None
    blocks = f"partition.num_blocks={row['num_blocks']} partition.overlap={row['overlap']}"
    return blocks if row["method"] == "diffusion_blocks" else f"method={row['method']}"


def _speed(row: Row) -> str | None:
    if row["table"] != "speed":
        return None
    return {"end_to_end": "method=end_to_end", "one_block": "method=diffusion_blocks"}.get(row["method"])


def _plain_or(tables: tuple[str, ...], plain: str, diffusion: str) -> Callable[[Row], str | None]:
    """Returns what finds the settings of a plain model and of diffusion among the paper's rows of some tables."""
    return lambda row: None if row["table"] not in tables else plain if row["method"] == "end_to_end" else diffusion


TABLES = (
    Table(
        "main",
        "End to end, blocks, and one shallow network",
        "`shallow` is the control that the paper lacks: one network of a block's depth over all levels, which makes as many "
        "steps as all blocks together, so that its arithmetic, memory and sampling cost are those of the blocks.",
        "method=end_to_end",
        lambda row: f"method={row['method']}" if row["table"] == "main" else None,
        settings=lambda setting: "train.steps=" not in setting,
    ),
    Table(
        "main_longer",
        "The same, trained four times as long",
        "At digits 6,000 steps a block, in place of 1,500: what is left of the differences when the curves have levelled off.",
        "method=end_to_end train.steps=6000",
        lambda row: f"method={row['method']} train.steps=6000" if row["table"] == "main" else None,
        experiment="main",
        settings=lambda setting: setting.endswith("train.steps=6000"),
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
        scores=SAMPLED,
    ),
    Table(
        "solver",
        "Solver and spacing",
        "Not a table of the paper. 25 nodes of Heun cost as many evaluations as 49 of Euler. The held-out loss does not depend "
        "on the sampler.",
        "sampler.name=euler sampler.schedule=karras sampler.steps=49",
        scores=SAMPLED,
    ),
    Table(
        "weighting",
        "Weight of the loss over the levels",
        "The paper calls the weight crucial and shows no table. The held-out loss is EDM's for every setting.",
        "objective.weighting=edm partition=equi_probability",
    ),
    Table(
        "classification",
        "Classification: ways to train a ViT",
        "Equal depth, width, data, augmentation and arithmetic for every method, by passes through layers, of which those that "
        "know a level are larger (AdaLN). The state and the activations are those of the largest step.",
        "method=end_to_end",
        lambda row: f"method={row['method']}" if row["table"] == "classification" else None,
        scores=LABELS,
        metrics=("accuracy",),
        against=("cifar100", "accuracy"),
        plotted=False,
        settings=lambda setting: setting.startswith("method="),
    ),
    Table(
        "classification_choices",
        "Classification: choices of DiffusionBlocks",
        "One choice changed at a time; `preset=released` has those of the released code together. The nats are those of the "
        "label that the noisy embedding gives away between a block's edges, the cross-entropy is the block's on its own levels; "
        "a block that does as well on images of other labels ignores its image. "
        "`eval.` changes how a trained model predicts, not its weights.",
        "method=diffusion_blocks",
        scores=(*LABELS, *BY_BLOCK),
        plotted=False,
        experiment="classification",
        settings=lambda setting: setting == "method=diffusion_blocks" or not setting.startswith("method="),
    ),
    Table(
        "noprop",
        "NoProp, and DiffusionBlocks on its network",
        "Every network makes `train.steps`, however many there are. Backpropagation through this network is not among our "
        "methods.",
        "method=noprop_dt",
        _noprop,
        scores=LABELS,
        metrics=("accuracy",),
        against=("cifar100", "accuracy"),
        plotted=False,
    ),
    Table(
        "target_table",
        "The table of label embeddings",
        "Fixed from the seed, or learned with all blocks in one job; rows of norm 1, or not. A mean cosine of 1 is a table that "
        "has collapsed.",
        "objective.normalize=true objective.table=fixed",
        scores=(*LABELS[:4], Score("denoising_table_cosine", "mean cosine of rows"), *LABELS[4:]),
        plotted=False,
    ),
    Table(
        "speed",
        "Time of a step",
        "A step of DiffusionBlocks trains one block; blocks make as many steps each as end to end makes.",
        "method=end_to_end",
        _speed,
        scores=(replace(STEP, better="lower", judged=True), Score("seconds", "seconds of all steps"), *MEMORY),
        metrics=("seconds_per_iteration",),
        against=("cifar100", "seconds_per_iteration"),
        plotted=False,
    ),
    Table(
        "text_ar",
        "Autoregressive language model",
        "The plain model, diffusion with one block, and blocks, at equal token-layers. The paper's layout is `token_diffusion`, "
        "the noisy text beside the clean one, which costs twice as much a step; its values stand at the inline blocks.",
        "method=end_to_end objective=next_token",
        _plain_or(
            ("main", "autoregressive"),
            "method=end_to_end objective=next_token",
            "method=diffusion_blocks objective=token_diffusion_inline",
        ),
        scores=(*TEXT, *NATS),
        metrics=("mauve", "ppl_llama2", "ppl_gpt2xl"),
        against=("lm1b", "mauve"),
        floor="held-out text",
        plotted=False,
    ),
    Table(
        "text_masked",
        "Masked diffusion language model",
        "One block is MD4. The bound is over the blocks' own, disjoint intervals.",
        "method=end_to_end",
        lambda row: f"method={row['method']}" if row["table"] == "masked" else None,
        scores=MASKED,
        metrics=("bpc",),
        against=("text8", "bpc"),
        floor="held-out text",
        plotted=False,
    ),
    Table(
        "text_recurrent",
        "Recurrent depth",
        "The plain model repeats its core at random and backpropagates through the last repetitions; as diffusion a step is one "
        "pass. Equal steps are equal tokens; three times the steps are the paper's ratio of epochs, 15 to 5.",
        "objective=next_token",
        _plain_or(("recurrent",), "objective=next_token", "objective=token_diffusion_inline train.steps=3000"),
        scores=(*TEXT, *NATS),
        metrics=("mauve", "ppl_llama2", "ppl_gpt2xl"),
        against=("lm1b", "mauve"),
        floor="held-out text",
        plotted=False,
    ),
    Table(
        "text_num_blocks",
        "Number of blocks, autoregressive",
        "The same depth cut into more blocks; one block is diffusion without the blocking.",
        "partition.num_blocks=1",
        lambda row: f"partition.num_blocks={row['num_blocks']}" if row["table"] == "num_blocks" else None,
        scores=(*TEXT, *NATS),
        metrics=("mauve",),
        against=("lm1b", "mauve"),
        floor="held-out text",
    ),
)
# The paper's scales have overlays of their own, with EDM's levels and weight.
_BY_NAME = {table.name: table for table in TABLES}
_EDM = "method=diffusion_blocks objective=token_diffusion_edm"
_EDM_BLOCKS = _plain_or(("main", "autoregressive"), "method=end_to_end objective=next_token", _EDM)
_PLAIN = "objective=next_token train.steps=79500"
_EDM_AR = replace(
    _BY_NAME["text_ar"], about="The plain model, diffusion with one block, and blocks, in the paper's layout.", paper=_EDM_BLOCKS
)
TABLES += (
    replace(_EDM_AR, name="lm1b_ar", title="Autoregressive language model, LM1B"),
    replace(_EDM_AR, name="owt_ar", title="Autoregressive language model, OpenWebText"),
    replace(_BY_NAME["text_masked"], name="text8_masked", title="Masked diffusion language model, text8"),
    replace(
        _BY_NAME["text_recurrent"],
        name="lm1b_recurrent",
        title="Recurrent depth, LM1B",
        about="The plain model over 5 epochs, diffusion over 15.",
        reference=_PLAIN,
        paper=_plain_or(("recurrent",), _PLAIN, "objective=token_diffusion_edm_inline"),
    ),
    replace(_BY_NAME["text_num_blocks"], name="lm1b_num_blocks", title="Number of blocks, autoregressive, LM1B"),
)


class Column(NamedTuple):
    """What shares a column: one metric at one guidance under one protocol, against one split."""

    metric: str
    guidance: str
    protocol: str
    split: str


class Shown(NamedTuple):
    """A column of a table: how it is headed, what it shows, and its values by setting and seed, or several of a series."""

    heading: str
    score: Score
    column: Column
    values: list[Values]

    @property
    def name(self) -> str:
        """What it is called in a sentence and in a plot."""
        return f"FID at guidance {float(self.column.guidance):g}" if self.score.metric == FID else self.heading


class Group(NamedTuple):
    """What shares a subtable: one scale with one version's settings."""

    scale: str
    paper: str
    match: str

    @property
    def title(self) -> str:
        return f"{self.scale}, settings of {self.paper}" + ("" if self.match == "layer_work" else f", matched by {self.match}")


# What the benchmark measures, by the first part of a row's name; the others are the shape and the number of blocks.
MEASURED = {
    "state": "blocks x bytes of a block's training state over end to end's",
    "activations": "the same of activations, without those of embeddings and head",
    "block_activations": "activations of a block's step over the end-to-end step's",
    "outside": "share of a step outside forward pass, backward pass and optimizer",
    "naive_over_ours": "a step of the naive loop over ours",
    "guidance": "guidance in two forward passes over one",
    "training": "blocks x a block's step over the end-to-end step",
    "sampling": "sampling end to end over by blocks, over blocks",
    "inference": "a prediction by blocks over end to end",
    "bf16_over_fp32": "a step in float32 over bfloat16",
    "compiled_over_eager": "an eager step over the compiled one",
    "compiled_over_fp32_eager": "an eager step in float32 over the compiled one",
}
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
    """Returns the sample standard deviation; None for fewer than two values, nan where one of them is not finite."""
    values = list(values)
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


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


def is_seen(difference: tuple[float, float | None, int] | None) -> bool:
    """Returns whether a paired difference is beyond its seeds' noise; one that is not a number is not."""
    return difference is not None and difference[1] is not None and abs(difference[0]) > RESOLVED * difference[1]


def verdict(name: str, ours: Values, paper: dict[str, float], better: str = "lower", paper_better: str = "lower") -> str:
    """Says whether a score orders the settings as the paper's does; `better` is what is better in each, lower or higher.

    A pair of settings is seen if the mean of its differences by seed is beyond twice its standard error. With few seeds that is
    a low bar, so the number of pairs that would pass it with no difference at all, by Student's t, stands beside. Settings that
    the paper has equal are no pair; one of which a seed is not finite is named and left out.
    """
    lost = [setting for setting, mean in means(ours).items() if not math.isfinite(mean)]
    if lost:
        ours = {setting: seeds for setting, seeds in ours.items() if setting not in lost}
        name += f" (not finite: {', '.join(f'`{setting}`' for setting in lost)})"
    if not ours:
        return f"{name}: nothing to compare."
    # Of settings that have been run with different seeds, those that all share are compared: seeds differ more than settings.
    shared = set.intersection(*(set(seeds) for seeds in ours.values()))
    average = means({setting: {seed: seeds[seed] for seed in shared} for setting, seeds in ours.items()} if shared else ours)
    choose, choose_paper = ({"lower": min, "higher": max}[word] for word in (better, paper_better))
    best = choose(average, key=average.get)
    span, noise = max(average.values()) - min(average.values()), pooled_spread(ours)
    effect = f"the settings span {number(span)}" + (f", the seeds' spread is {number(noise)}" if noise else ", there is one seed")
    if any(set(seeds) != shared for seeds in ours.values()):
        effect += (
            f" (best and span of the seeds that all share, {', '.join(map(str, sorted(shared)))})"
            if shared
            else " (no seed is shared by all)"
        )
    common = [setting for setting in ours if setting in paper]
    pairs = [(one, other) for one, other in itertools.combinations(common, 2) if paper[one] != paper[other]]
    if not pairs:
        return f"{name}: best is `{best}`; {effect}; the paper gives nothing to compare."
    seen = {True: 0, False: 0}
    unseen, alone, chance = 0, 0, 0.0
    for one, other in pairs:
        difference = paired(ours[one], ours[other])
        if difference is None or difference[1] is None:
            alone += 1
            continue
        chance += 2 * stdtr(difference[2] - 1, -RESOLVED)
        if not is_seen(difference):
            unseen += 1
        else:
            first_is_better = (difference[0] < 0) == (better == "lower")
            seen[first_is_better == ((paper[one] < paper[other]) == (paper_better == "lower"))] += 1
    if not seen[True] and not seen[False]:
        word = "the paper's trend is not resolved"
    elif not seen[False]:
        word = "the paper's trend appears" if seen[True] > len(pairs) / 2 else "the paper's trend appears in part"
    elif not seen[True]:
        word = "the paper's trend is reversed" if seen[False] > len(pairs) / 2 else "the paper's trend does not appear"
    else:
        word = "the paper's trend appears in part" if seen[True] > seen[False] else "the paper's trend does not appear"
    best_common = choose(common, key=average.get)
    counts = [f"{seen[True]} differ as in the paper", f"{seen[False]} the other way"]
    counts += [f"{unseen} by less than {RESOLVED:g} standard errors"] if unseen else []
    counts += [f"{alone} have fewer than two seeds in common"] if alone else []
    by_chance = f" (by chance alone {chance:.1f} would differ)" if chance else ""
    compared = f"{len(pairs)} pair{'s' * (len(pairs) != 1)} of settings"
    return (
        f"{name}: **{word}**. Of {compared} {', '.join(counts)}{by_chance}; of these our best is "
        f"`{best_common}`, the paper's `{choose_paper(common, key=paper.get)}`; {effect}."
    )


def beyond_reference(ours: Values, reference: str) -> str:
    """Names the settings whose difference to the reference is seen, lower or higher."""
    if reference not in ours:
        return ""
    seen = []
    for setting in in_order(ours.keys() - {reference}, reference):
        difference = paired(ours[setting], ours[reference])
        if is_seen(difference):
            seen.append(f"`{setting}` ({difference[0]:+.3g}, {difference[2]} seeds)")
    return f" Seen to differ from `{reference}`: {', '.join(seen) or 'none'}."


# ---------------------------------------------------------------------------------------------------------------------
# From records to tables


def columns_of(rows: list[Row], protocols: dict[str, dict[str, object]]) -> dict[Column, Values]:
    """Returns the scores of a group by column, setting and seed, without the floor; `protocols` by digest."""
    found: dict[Column, Values] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["setting"] != FLOOR and not is_trivial(row["metric"], protocols[row["protocol"]]):
            column = Column(row["metric"], row["guidance"], row["protocol"], str(protocols[row["protocol"]].get("split", "")))
            found[column][row["setting"]][int(row["seed"])] = float(row["value"])
    return {column: dict(values) for column, values in sorted(found.items())}


def is_trivial(metric: str, protocol: dict[str, object]) -> bool:
    """Returns whether a score says nothing: the five likeliest of ten classes or fewer."""
    return metric == "top5" and protocol["trained.data.num_classes"] <= 10


def best_guidance(columns: dict[Column, Values]) -> str | None:
    """Returns the guidance at which FID over all settings and splits is lowest, the same for all, if any is finite.

    By the geometric mean, so that a setting that fails (three steps of sampling) does not choose for all.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for column, values in columns.items():
        if column.metric == FID:
            scores[column.guidance] += [math.log(max(mean, 1e-9)) for mean in means(values).values()]
    average = {guidance: mean for guidance, found in scores.items() if math.isfinite(mean := statistics.fmean(found))}
    return min(average, key=average.get) if average else None


def shown_columns(table: Table, columns: dict[Column, Values]) -> list[Shown]:
    """Returns what a table shows of its group's columns, in the order of its scores.

    One metric of two protocols stands twice, with the beginning of the protocol's digest in its heading.
    """
    best = best_guidance(columns)
    shown = []
    for score in table.scores:
        at = best if score.at == BEST else score.at
        if score.at != BEST and score.metric == FID and at == best:
            continue  # it stands there as the best
        parts: dict[str, list[tuple[int, Column]]] = defaultdict(list)  # by protocol
        for column in columns:
            name, _, index = column.metric.rpartition("_") if score.series else (column.metric, "", "0")
            if (name, column.guidance) == (score.metric, at) and index.isdigit():
                parts[column.protocol].append((int(index), column))
        for found in parts.values():
            own = [column for _, column in sorted(found)]
            heading = score.heading
            if score.metric == FID:
                heading += f", {own[0].split} split, at guidance {float(at):g}" + (" (best)" if at == best else "")
            shown.append(Shown(heading, score, own[0], [in_unit(columns[column], score.unit) for column in own]))
    alike = Counter(item.heading for item in shown)
    return [
        item._replace(heading=f"{item.heading} (`{item.column.protocol[:4]}`)") if alike[item.heading] > 1 else item
        for item in shown
    ]


def floors(rows: list[Row], shown: list[Shown], protocols: dict[str, dict[str, object]]) -> dict[Column, float]:
    """Returns what real data score in each column that was measured as they were: its protocol has all of theirs."""
    found = {}
    for row in rows:
        if row["setting"] == FLOOR:
            theirs = {key: value for key, value in protocols[row["protocol"]].items() if key != "samples"}  # which say: real
            for item in shown:
                column = item.column
                if column.metric == row["metric"] and theirs.items() <= protocols[column.protocol].items():
                    found[column] = float(row["value"])
    return found


def in_unit(values: Values, unit: float) -> Values:
    return {setting: {seed: unit * value for seed, value in seeds.items()} for setting, seeds in values.items()}


def paper_columns(table: Table, paper: list[Row]) -> dict[str, dict[str, float]]:
    """Returns the paper's scores by heading and setting."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in paper:
        setting = table.paper(row)
        if setting is not None and row["metric"] in table.metrics:
            found[paper_heading(row["version"], row["data"], row["metric"], row["split"])][setting] = float(row["value"])
    return dict(found)


def paper_notes(table: Table, paper: list[Row], settings: list[str]) -> str:
    """Returns what paper_tables.csv remarks on the values of these settings: what is inferred, derived or not stated."""
    where: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))  # remark -> setting -> version and data
    for row in paper:
        setting = table.paper(row)
        if setting in settings and row["metric"] in table.metrics and row["note"]:
            for remark in row["note"].split("; "):
                where[remark][setting][f"{row['version']} {row['data']}"] = None
    lines = []
    for remark, by_setting in where.items():
        alike: dict[str, list[str]] = defaultdict(list)
        for setting, sets in by_setting.items():
            alike[", ".join(sets)].append(f"`{setting}`")
        found = {sets: ", ".join(own) for sets, own in alike.items()}
        lines.append(f"{remark} ({'; '.join(f'{sets}: {own}' for sets, own in found.items())})")
    return "; ".join(lines)


def paper_heading(version: str, data: str, metric: str, split: str = "test") -> str:
    """Returns how a column of the paper's is headed; `split` is empty where there is none."""
    return f"{version}: {data}, " + f"{split} {PAPER[metric][0]}".strip()


def paper_trend(table: Table, group: "Group", paper: dict[str, dict[str, float]], split: str = "") -> dict[str, float]:
    """Returns the paper's scores that ours are compared with: of the group's own data where it has some, in its version.

    Args:
        split: that ours are scored against; test, or none, where that is not known.
    """
    data, metric = table.against
    headings = [paper_heading(group.paper, name, metric, own) for name in (group.scale, data) for own in (split or "test", "")]
    return next((paper[heading] for heading in headings if heading in paper), {})


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def benchmark_tables(rows: list[Row]) -> str:
    """Returns what the benchmark measured as Markdown, a table for each machine and commit."""
    text = []
    for about in dict.fromkeys(tuple(row[name] for name in ("hardware", "threads", "torch", "commit")) for row in rows):
        own = [row for row in rows if (row["hardware"], row["threads"], row["torch"], row["commit"]) == about]
        hardware, threads, torch, commit = about
        load = max(float(row["load"]) for row in own)
        code = f"torch {torch}, load {load:g} before it began, commit `{short_commit(commit, 7)}`"
        text.append(f"{hardware}, {threads} threads, {code}:\n")
        blocks = sorted({row["name"].split("/")[2] for row in own})
        cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        bounds: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for row in own:
            what, shape, number_of_blocks = row["name"].split("/")
            missed = " (missed)" if row["passed"] == "no" else ""
            cells[what, shape][number_of_blocks] = f"{float(row['value']):.3f}{missed}"
            bounds[what, shape][row["bound"]] = None
        lines = [
            [MEASURED[what], shape, *(found.get(b, "") for b in blocks), ", ".join(bounds[what, shape])]
            for (what, shape), found in cells.items()
        ]
        text.append(markdown(["measured", "shape", *(f"{b} blocks" for b in blocks), "bound"], lines))
    return "\n".join(text)


def group_table(table: Table, shown: list[Shown], floor: dict[Column, float], paper: dict[str, dict[str, float]]) -> str:
    """Returns a group's table: settings down, the paper's values and ours across, the floor last.

    Args:
        floor: see `floors`.
        paper: heading -> setting -> value.
    """
    settings = settings_of(table, shown)
    known = [heading for heading, values in paper.items() if any(setting in values for setting in settings)]
    header = ["setting", *known, "seeds"]
    for item in shown:
        header += [item.heading, "difference"] if item.score.better else [item.heading]
    rows = []
    for setting in settings:
        seeds = {seed for item in shown for seed in item.values[0].get(setting, {})}
        theirs = [paper[heading].get(setting) for heading in known]
        cells = [f"`{setting}`" if setting else "the overlay's own", *(paper_cell(value) for value in theirs), str(len(seeds))]
        for item in shown:
            cells.append(cell(item, setting))
            cells += [difference_cell(item.values[0], setting, table.reference)] if item.score.better else []
        rows.append(cells)
    cells = [f"floor: {table.floor}", *[""] * len(known), ""]
    for item in shown:
        value = floor.get(item.column)
        cells += [number(None if value is None else value * item.score.unit)] + [""] * bool(item.score.better)
    return markdown(header, [*rows, cells] if floor else rows)


def settings_of(table: Table, shown: list[Shown]) -> list[str]:
    """Returns the settings that have values, in order."""
    return in_order({setting for item in shown for values in item.values for setting in values}, table.reference)


def paper_cell(value: float | None) -> str:
    """Returns one of the paper's values with two decimals, or as many as it has."""
    return "" if value is None else max(f"{value:.2f}", f"{value:g}", key=len)


def cell(item: Shown, setting: str) -> str:
    """Returns a setting's value, mean ± standard deviation, or the means of a series."""
    if not item.score.series:
        seeds = item.values[0].get(setting, {})
        alike = item.score.counted and len(set(seeds.values())) == 1
        return "" if not seeds else number(next(iter(seeds.values()))) if alike else with_spread(seeds)
    return ", ".join(f"{statistics.fmean(values[setting].values()):.3g}" for values in item.values if setting in values)


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
        self.levels, self.curves = (read_records(records / f"{name}.csv", columns) for name, columns in SERIES_COLUMNS.items())
        names = sorted({table.records for table in TABLES})
        self.tables = {name: read_records(records / f"{name}.csv", COLUMNS) for name in names}
        self.edges = read_records(records / "edges.csv", edges.COLUMNS)
        self.studies = {
            study: read_records(records / "studies" / f"{study}.csv", (*key, *conversion.SCORES))
            for study, key in conversion.KEYS.items()
        }
        self.benchmark = read_records(records / "benchmark.csv", benchmark.COLUMNS)
        found = [*self.tables.values(), self.edges, *self.studies.values()]
        require(any(found), f"{records} holds no records: make some by experiments.collect, or set --records")
        self.protocols = read_protocols(records, [*self.tables.values(), self.levels, self.curves])
        self.text: list[str] = []
        self.readme: list[str] = []

    def write(self) -> Path:
        """Writes REPORT.md and report/*.png, returns the path of the former, and leaves the README's part in `readme`.

        What is there stays as it was until all is drawn.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "REPORT.md"
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            self.drawn = Path(folder)
            self.text.append((ROOT / "report_head.md").read_text())
            for table in TABLES:
                rows = self.tables[table.records]
                rows = [row for row in rows if row["setting"] == FLOOR or table.settings(row["setting"])]
                if any(row["setting"] != FLOOR for row in rows):
                    self.table(table, rows)
            self.text += edges.section(self.edges)
            self.text += conversion.section(self.studies)
            write_atomically(path, "\n".join(self.text))
            self.pictures.mkdir(exist_ok=True)
            for old in self.pictures.glob("*.png"):
                old.unlink()
            for picture in self.drawn.iterdir():
                picture.replace(self.pictures / picture.name)
        return path

    def into_readme(self, text: str) -> str:
        """Returns a README with the tables and pictures of README_TABLES, and the benchmark, between their marks."""
        for (begin, end), drawn in ((MARKS, "\n".join(self.readme)), (COST_MARKS, benchmark_tables(self.benchmark))):
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{drawn}{end}{rest.partition(end)[2]}"
        return text

    def table(self, table: Table, rows: list[Row]) -> None:
        """Adds a table with a part for each scale and version."""
        self.text += [f"## {table.title}\n", f"{table.about}\n"]
        paper = paper_columns(table, self.paper)
        groups: dict[Group, list[Row]] = defaultdict(list)
        for row in rows:
            groups[Group(row["scale"], row["paper"], row["match"])].append(row)
        for group, own in sorted(groups.items()):
            if any(row["setting"] != FLOOR for row in own):
                self.group(table, group, own, paper)

    def group(self, table: Table, group: Group, rows: list[Row], paper: dict[str, dict[str, float]]) -> None:
        """Adds one scale's table, verdicts and pictures."""
        shown = shown_columns(table, columns_of(rows, self.protocols))
        floor = floors(rows, shown, self.protocols)
        self.text += [f"### {group.title}\n", group_table(table, shown, floor, paper)]
        for item in shown:
            if item.score.judged:
                compared = paper_trend(table, group, paper, item.column.split)
                words = verdict(
                    item.name[0].upper() + item.name[1:], item.values[0], compared, item.score.better, PAPER[table.against[1]][1]
                )
                self.text.append(f"- {words}{beyond_reference(item.values[0], table.reference)}")
        self.text.append("")
        protocols = sorted({f"{item.heading} `{item.column.protocol}`" for item in shown})
        hardware = sorted({row["hardware"] for row in rows})
        example = next(row["command"] for row in rows if row["setting"] != FLOOR)
        where = f"`{example}` on {'; '.join(hardware)}"
        if notes := paper_notes(table, self.paper, settings_of(table, shown)):
            self.text.append(f"<sub>On the paper's values: {notes}.</sub>\n")
        self.text.append(f"<sub>One of the runs: {where}. Protocols (records/protocols.json): {', '.join(protocols)}.</sub>\n")
        if table.plotted:
            self.settings_plot(table, group, shown, paper)
        if (table.name, group) in README_TABLES:
            compared = paper_trend(table, group, paper)
            test = {heading: values for heading, values in paper.items() if values is compared}
            self.readme += [
                f"**{table.title}** ({group.title})\n",
                group_table(table, [item for item in shown if item.score.better], floor, test),
                f"![{table.title}](experiments/report/{picture_name(table, group, 'settings')})\n",
            ]
        self.levels_plot(table, group)
        self.curves_plot(table, group)
        self.image_rows(table, group, rows)

    def picture(self, table: Table, group: Group, kind: str, caption: str) -> Path:
        """Adds a picture to the text and returns where it is to be written."""
        name = picture_name(table, group, kind)
        self.text.append(f"![{caption}](report/{name})\n\n{caption}\n")
        return self.drawn / name

    def settings_plot(self, table: Table, group: Group, shown: list[Shown], paper: dict[str, dict[str, float]]) -> None:
        """Draws judged scores over settings, the paper's on an axis of its own."""
        panels = [(item.name, item.values[0]) for item in shown if item.score.judged]
        panels = panels or [(item.name, item.values[0]) for item in shown if item.score.better][:1]
        settings = settings_of(table, shown)
        metric = PAPER[table.against[1]][0]
        caption = f"Our scores (left axes, with the seeds' spread) and the paper's {metric} (right axes)."
        path = self.picture(table, group, "settings", caption)
        test = {heading: values for heading, values in paper.items() if "test" in heading and metric in heading}
        plots.plot_settings([line(setting, "\n") for setting in settings], settings, panels, test, metric, path)

    def levels_plot(self, table: Table, group: Group) -> None:
        """Draws each setting's held-out loss over the levels, relative to the reference, mean over seeds."""
        grid, curves = mean_series(self.levels, table, group, "levels", "loss")
        if table.scores is IMAGES and table.reference in curves and len(curves) > 1:
            caption = f"Held-out loss at each level (mean over seeds), on the right over that of `{table.reference}`."
            path = self.picture(table, group, "levels", caption)
            plots.plot_levels(grid, {line(name): curve for name, curve in curves.items()}, line(table.reference), path)

    def curves_plot(self, table: Table, group: Group) -> None:
        """Draws the held-out loss over the training: of the main table, where the question is whether the baseline is done."""
        if table.records != "main":
            return
        curves = {}
        rows = [row for row in self.curves if row["table"] == table.records and table.settings(row["setting"])]
        for setting in sorted({row["setting"] for row in rows}):
            steps, losses = mean_series([row for row in rows if row["setting"] == setting], table, group, "step", "loss")
            if losses:
                curves[line(setting)] = (steps / steps[-1], losses[setting])
        if curves:
            equal = "do the same arithmetic in layers" if group.match == "layer_work" else "make as many steps in all"
            caption = f"Held-out loss (EMA weights) over the training; all settings {equal}."
            plots.plot_curves(curves, self.picture(table, group, "curves", caption))

    def image_rows(self, table: Table, group: Group, rows: list[Row]) -> None:
        """Puts the settings' first images below each other."""
        settings = in_order({row["setting"] for row in rows if row["setting"] != FLOOR}, table.reference)
        found = []
        for setting in settings:
            row = {"table": table.records, **group._asdict(), "setting": setting}
            path = self.records / "samples" / image_name(row)
            if path.exists():
                found.append((setting, np.asarray(Image.open(path))))
        widest = max((strip.shape[1] for _, strip in found), default=0)  # a setting may have drawn fewer images than others
        if found:
            order = ", ".join(f"`{setting}`" for setting, _ in found)
            path = self.picture(table, group, "samples", f"Samples at guidance 1 from the same seeds, from above: {order}.")
            gap = np.full((1, widest, *found[0][1].shape[2:]), 128, np.uint8)
            strips = [wider(strip, widest) for _, strip in found]
            stacked = np.concatenate([part for strip in strips for part in (strip, gap)][:-1])
            scale = max(1, 960 // stacked.shape[1])
            Image.fromarray(stacked.repeat(scale, 0).repeat(scale, 1)).save(path, optimize=True)


def wider(strip: np.ndarray, width: int) -> np.ndarray:
    """Returns a strip of images, (H, W) or (H, W, 3), with grey to its right up to a width."""
    return np.pad(strip, ((0, 0), (0, width - strip.shape[1]), *[(0, 0)] * (strip.ndim - 2)), constant_values=128)


def picture_name(table: Table, group: Group, kind: str) -> str:
    """Returns the file name of a picture."""
    return f"{table.name}_{group.scale}_{group.paper}_{group.match}_{kind}.png"


def line(setting: str, between: str = ", ") -> str:
    """Returns a setting's values alone."""
    return between.join(pair.partition("=")[2] for pair in setting.split())


def mean_series(rows: list[Row], table: Table, group: Group, x: str, y: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the x values that all of the group's rows share, rising, and y averaged over seeds by setting.

    Rows are those of the group's commonest protocol.
    """
    asked = [row for row in rows if row["table"] == table.records and table.settings(row["setting"])]
    own = [row for row in asked if Group(row["scale"], row["paper"], row["match"]) == group]
    if not own:
        return np.zeros(0), {}
    protocol = statistics.mode(row["protocol"] for row in own)
    series = defaultdict(list)
    for row in own:
        if row["protocol"] == protocol:
            values = zip(map(float, row[x].split()), map(float, row[y].split()), strict=True)
            series[row["setting"]].append(dict(values))
    grid = sorted(set.intersection(*(set(values) for found in series.values() for values in found)))
    means = {
        setting: np.mean([[values[place] for place in grid] for values in found], axis=0)
        for setting, found in sorted(series.items(), key=lambda item: natural(item[0]))
    }
    return np.array(grid), means if grid else {}


def main() -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description="Draw the report from the records.")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT, help="folder of REPORT.md (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        report = Report(arguments.records, arguments.out)
        print(report.write())
        if arguments.out == ROOT:
            write_atomically(README, report.into_readme(README.read_text()))
    except SettingError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: the report in {arguments.out} cannot be drawn ({error}): set --out, or put back what this names")


if __name__ == "__main__":
    main()
