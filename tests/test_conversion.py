"""The studies of pretrained models: at toy size, resumed; the mixed target on closed forms; verdicts from rows."""

from pathlib import Path

import pytest
import torch
from conftest import make_config

import hardware as machine
from data import BatchSource, ImageData
from experiments import conversion
from experiments.collect import read_rows
from model import Draw, build_module, build_objective

TOY = ["scale=digits", "threads=1", "device=cpu", "model.depth=3", "model.width=16", "model.patch_size=4", "train.steps=4"]
TOY += ["train.batch_size=8", "eval.loss_levels=8", "eval.loss_images=40"]


def refuse(*_: object) -> None:
    raise AssertionError("a row that was there was trained again")


@pytest.mark.parametrize(("study", "count"), [("warm_start", 14), ("adapt", 6)])
def test_a_study_at_toy_size_goes_on_where_it_stopped(study: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, run = tmp_path / "rows.csv", getattr(conversion, study)
    run(TOY, 0, path)
    rows = read_rows(path)
    assert len(rows) == count and len({tuple(row[key] for key in conversion.KEYS[study]) for row in rows}) == count
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # as if it had stopped before the last row
    run(TOY, 0, path)
    again = read_rows(path)
    assert [row | {"cpu_seconds": ""} for row in again] == [row | {"cpu_seconds": ""} for row in rows]
    monkeypatch.setattr(conversion, "train_blocks", refuse)
    run(TOY, 0, path)
    text = "\n".join(conversion.section({study: again}))
    assert "Verdict" in text and all(f"| {row['start']} |" in text for row in rows)


def test_a_block_that_is_not_adapted_keeps_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversion.machine, "environment", lambda: {"commit": None})  # as outside git
    conversion.adapt(TOY, 0, tmp_path / "rows.csv")
    rows = {row["adapted"]: row["by_block"].split() for row in read_rows(tmp_path / "rows.csv") if row["start"] != "scratch"}
    for adapted, found in rows.items():
        for block in range(3):
            assert found[block] == rows["0 1 2" if str(block) in adapted else "none"][block]
    assert rows["none"] != rows["0 1 2"]


@pytest.mark.parametrize(
    ("typed", "words"), [("seed=3", "seed was typed"), ("method=shallow", "method was typed"), ("train.stepz=5", "stepz")]
)
def test_what_a_study_sets_or_does_not_know_is_refused_in_a_sentence(
    typed, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["conversion", "adapt", *TOY, typed, "--records", str(path)])
    with pytest.raises(SystemExit, match=f"error: .*{words}"):
        conversion.main()
    assert not path.exists()


def distilled(share: float, draws: int) -> conversion.DistilledObjective:
    config = make_config()
    teacher = build_module(make_config(method={"name": "end_to_end"}), "block_0")
    return conversion.DistilledObjective(**vars(build_objective(config)), teacher=teacher, share=share, draws=draws, cache={})


def test_the_mixed_target_lies_between_data_and_teacher(digits: ImageData):
    source, modules = BatchSource(digits, torch.device("cpu"), seed=0), {"block_1": build_module(make_config(), "block_1")}
    draw = Draw(1, 5, 8, slice(0, 8))
    batch = source.batch(1, 5, 8, slice(0, 8))
    plain = build_objective(make_config()).training_loss(modules, batch, draw, None)
    assert torch.equal(distilled(0.0, 0).training_loss(modules, batch, draw, None), plain)
    itself = distilled(1.0, 0)
    assert itself.training_loss({"block_1": itself.teacher}, batch, draw, None).abs().max() == 0


def test_the_teacher_is_asked_for_as_many_draws_as_there_are(digits: ImageData):
    config, hardware = make_config(train={"steps": 5}), machine.set_up("cpu", "fp32", 1)
    source = BatchSource(digits, torch.device("cpu"), seed=0)
    asked = {}
    for draws in (16, 0):
        objective, calls = distilled(0.5, draws), []
        objective.teacher.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        conversion.train_blocks(config, objective, source, hardware)
        asked[draws] = len(calls)
    assert asked == {16: 3 * 2, 0: 3 * 5}  # two batches of 8 for each of three blocks, or one in every step


def row(**columns: object) -> dict[str, str]:
    usual = {"scale": "digits", "settings": "train.steps=9", "draws": "none", "times": "1", "by_block": "1 2 3", "by_level": "1"}
    return {key: str(value) for key, value in (usual | columns).items()}


def test_a_verdict_needs_every_seed():
    """Better than scratch at S in both seeds, than scratch at 2 S in one."""
    rows = [row(seed=seed, start="scratch", heldout_loss=loss) for seed, loss in enumerate((0.5, 0.6))]
    rows += [row(seed=seed, start="scratch", times=2, heldout_loss=loss) for seed, loss in enumerate((0.3, 0.5))]
    rows += [row(seed=seed, start="clone", heldout_loss=loss) for seed, loss in enumerate((0.4, 0.4))]
    rows += [row(seed=seed, start="slice", heldout_loss=loss) for seed, loss in enumerate((0.7, 0.7))]
    rows += [row(seed=0, start="shallow", times=2, heldout_loss=0.3)]
    text = "\n".join(conversion.section({"warm_start": rows}))
    assert "Clones against the shallow denoiser trained twice as long: worse in the one seed, +0.1000." in text
    assert "against scratch at S: better in every seed: clone/none; worse in every seed: slice/none." in text
    assert "against scratch at 2 S: not told apart: clone/none; worse in every seed: slice/none." in text
    assert "| clone | none | S | 2 | 0.4000 | 1.0000 | 2.0000 | 3.0000 | -0.1500 | +0.0000 |" in text


def test_the_share_of_the_gain_that_some_blocks_have():
    loss = {"none": 1.0, "0": 0.8, "0 1": 0.54, "0 1 2": 0.5, "2": 0.96}
    rows = [row(seed=0, start="classes 0 to 4", adapted=adapted, heldout_loss=value) for adapted, value in loss.items()]
    text = "\n".join(conversion.section({"adapt": rows}))
    assert "some have: 0: 40%, 0 1: 92%, 2: 8%. The cleanest block transfers: no more than 10% of the gain" in text
