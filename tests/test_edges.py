"""The study of edges: dynamic programming against brute force, candidates on closed forms, experts as ordinary runs."""

import numpy as np
import pytest
import torch

import config as configuration
from dblock_modules import LogNormalLevels, make_partition
from evaluation import loss_grid
from experiments import edges
from experiments.collect import RECORDS, read_rows, write_rows

LAST = len(edges.GRID) - 1


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 6])
def test_dynamic_programming_finds_the_best_of_all_partitions(num_blocks):
    random = np.random.default_rng(num_blocks)
    losses = {pair: float(random.random()) for pair in edges.intervals()}
    least, best = edges.best_edges(losses, num_blocks)
    everything = edges.all_partitions(num_blocks)
    assert least == pytest.approx(min(edges.loss_of(losses, candidate) for candidate in everything))
    assert best in everything and edges.loss_of(losses, best) == pytest.approx(least)


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_equal_parts_of_the_training_distribution_are_equal_probability(num_blocks):
    grid = loss_grid(LogNormalLevels(), 64)
    found = edges.equal_parts(grid.levels, grid.mass, num_blocks)
    wanted = make_partition("equi_probability", num_blocks, LogNormalLevels()).edges
    assert [edges.GRID[edge] for edge in reversed(found)] == pytest.approx(wanted, rel=1e-4)


def test_parts_of_a_constant_loss_are_the_shares_of_the_weighting():
    """With a loss of 1 everywhere J is 1, whatever the partition."""
    rows = [
        {
            "seed": "0",
            "kind": "expert",
            "low": str(edges.GRID[low]),
            "high": str(edges.GRID[high]),
            "p_noise": "9 1",
            "log_uniform": "9 1",
        }
        for low, high in edges.intervals()
    ]
    for weighting in edges.WEIGHTINGS:
        losses = edges.losses_of(rows, "0", weighting, tenth=2)
        assert {round(edges.loss_of(losses, parts), 12) for parts in edges.all_partitions(3)} == {1.0}
        assert edges.losses_of(rows, "0", weighting, tenth=1)[0, LAST] == pytest.approx(9)


def test_an_expert_is_a_run_over_its_interval():
    """Its levels are those of a block without overlap: the training distribution, cut."""
    config = edges.expert_config(["train.steps=20"], seed=3, low=0.134076, high=0.676649, depth=4)
    assert (config.model.depth, config.partition.num_blocks, config.seed, config.train.evaluate_every) == (4, 1, 3, 2)
    q = torch.linspace(0, 1, 5, dtype=torch.float64)
    whole = LogNormalLevels()
    low, high = whole.cdf(torch.tensor([0.134076, 0.676649], dtype=torch.float64)).tolist()
    torch.testing.assert_close(configuration.levels(config).inverse_cdf(q), whole.inverse_cdf(low + q * (high - low)))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("seed=3", "seed was typed"),
        ("train.stepz=5", "stepz"),
        ("train.steps=0", "train.steps=0"),
        ("train.steps=25", "train.steps=25 is not a multiple of 10"),
    ],
)
def test_what_a_study_sets_or_cannot_do_is_refused_in_a_sentence(typed, words, tmp_path, monkeypatch):
    path = tmp_path / "edges.csv"
    monkeypatch.setattr("sys.argv", ["edges", typed, f"out={tmp_path}", "--records", str(path)])
    with pytest.raises(SystemExit, match=f"error: .*{words}"):
        edges.main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("typed", ["train.steps=20", "train.learning_rate=1", "eval.loss_images=5", "data=fashion_mnist"])
def test_experts_of_other_settings_are_another_study(typed, tmp_path):
    """Rows of one scale come from one study; an interval, a depth or a seed does not make another."""
    path = tmp_path / "edges.csv"
    settings = [edges.expert_config(["train.steps=10"], *own) for own in ((0, 0.03, 80.0, 4), (1, 0.002, 1.2, 12))]
    (study,) = {edges.study_of(config) for config in settings}
    row = {**dict.fromkeys(edges.COLUMNS, "0"), "scale": "digits", "study": study, "command": "the command of that"}
    write_rows(path, [row], edges.COLUMNS)
    with pytest.raises(configuration.SettingError, match="has a study of scale=digits with other settings, the command of that"):
        edges.measure(["train.steps=10", typed], 0, path)


def test_the_recorded_study_can_go_on():
    """A new setting must not make another study of the same command, or its next seed would be refused."""
    rows = read_rows(RECORDS / "edges.csv")
    study = edges.study_of(edges.expert_config(["train.steps=1000"], 5, 0.03, 80.0, 4))
    assert {(row["scale"], row["study"]) for row in rows} == {("digits", study)}


def test_a_section_names_every_candidate():
    random = np.random.default_rng(0)
    rows = []
    for seed in "01":
        for kind, low, high in [("expert", *pair) for pair in edges.intervals()] + [
            ("shallow_pilot", 0, LAST),
            ("deep_pilot", 0, LAST),
        ]:
            curve = edges.numbers(np.linspace(1, 0.5, 10) + random.random() / 100)
            row = {"seed": seed, "kind": kind, "low": str(edges.GRID[low]), "high": str(edges.GRID[high]), "steps": "10"}
            row |= dict.fromkeys(edges.WEIGHTINGS, curve) | {"levels": "", "loss": "", "dynamics": ""}
            row |= {"scale": "digits", "command": "made", "hardware": "up"}
            if kind != "expert":
                grid = loss_grid(LogNormalLevels(), 64)
                row |= {"levels": edges.numbers(grid.levels), "loss": edges.numbers(1 + random.random(64))}
                row |= {"dynamics": edges.numbers(1 + random.random(64))}
            rows.append(row)
    text = "\n".join(edges.section(rows))
    for words in ("equal probability", "equal reducible loss", "equal arc", "random", "seeds 0, 1", "p_noise", "log_uniform"):
        assert words in text
    other = [row | {"scale": "fashion", "seed": "7"} for row in rows if row["seed"] == "0"]
    both = "\n".join(edges.section([*rows, *other]))
    assert "### digits" in both and "### fashion" in both and "seeds 7;" in both and "seeds 0, 1;" in both
    assert edges.section(rows[:-1] + rows[:1]) != edges.section(rows) and edges.section(rows[:5]) == []
    late = [row | ({"loss": edges.numbers([3.0] * 64)} if row["kind"] == "deep_pilot" else {}) for row in rows]
    assert "| equal reducible loss | none: the deep pilot" in "\n".join(edges.section(late))
