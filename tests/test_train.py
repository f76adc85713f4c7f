"""The promises of the training loop, each to the bit."""

import dataclasses
import functools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import make_classifier, make_config

import checkpoint
import config as configuration
import train as training
from checkpoint import read_run
from config import SettingError, TrainConfig
from data import BatchSource
from hardware import Hardware
from kinds import build_objective
from model import part_name
from train import build_part, ema_decay, learning_rate, train_step, update_counts, update_order

EQUAL = [1 / 3] * 3


def hardware(precision: str = "fp32") -> Hardware:
    return Hardware(torch.device("cpu"), precision, 1)


def fit(config, data, folder, rows=None, measure=lambda modules, step: None):
    """Trains in a folder and returns each part's weights, EMA, optimizer state and count."""
    machine = hardware(config.train.precision)
    versions = dict.fromkeys(("torch", "python", "cpu", "commit"))
    description = training.describe(config, data.fingerprint, data.scale, machine, versions)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plots").mkdir(exist_ok=True)
    (folder / "samples").mkdir(exist_ok=True)
    config.log.progress = False
    training.train(
        config,
        build_objective(config),
        BatchSource(data, machine.device, seed=config.seed),
        folder,
        machine,
        description,
        lambda modules, path: path.touch(),
        measure,
        (rows if rows is not None else []).append,
    )
    return state(folder)


def state(folder):
    """Returns everything that a checkpoint holds, flat, as bytes by name."""
    run = read_run(folder)
    found = {}
    for name, part in run["parts"].items():
        found[f"{name}.step"] = part["step"]
        for weights in ("raw", "ema"):
            for key, value in checkpoint.load_weights(folder, run, name, weights).items():
                found[f"{name}.{weights}.{key}"] = value.numpy().tobytes()
        optimizer = torch.load(checkpoint.part_file(folder, run, name, "optimizer"), weights_only=True)["state"]
        for index, values in optimizer.items():
            found |= {f"{name}.{index}.{key}": value.numpy().tobytes() for key, value in values.items()}
    return found


def only(found, block):
    return {key: value for key, value in found.items() if key.startswith(f"{part_name(block)}.")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_independence_is_exact(digits, tmp_path, precision):
    """All blocks in one process, in any order, and each in a job of its own: the same bits."""
    settings = {"precision": precision}
    together = fit(make_config(train=settings), digits, tmp_path / "all")
    sequential = fit(make_config(train={**settings, "block_order": "sequential"}), digits, tmp_path / "sequential")
    assert together == sequential
    for block in range(3):
        alone = fit(make_config(train={**settings, "blocks": [block]}), digits, tmp_path / f"{block}")
        assert alone == only(together, block)
    pair = fit(make_config(train={**settings, "blocks": [2, 0]}), digits, tmp_path / "pair")
    assert pair == only(together, 0) | only(together, 2)


def test_uniform_order_trains_the_same_blocks(digits, tmp_path):
    """A job that owns one block makes exactly the steps that independent draws give it."""
    settings = {"block_order": "uniform", "steps": 5}
    together = fit(make_config(train=settings), digits, tmp_path / "all")
    counts = [together[f"{part_name(block)}.step"] for block in range(3)]
    assert sum(counts) == 15 and len(set(counts)) > 1
    assert fit(make_config(train={**settings, "blocks": [1]}), digits, tmp_path / "one") == only(together, 1)


def a_step(config, digits, block, parts):
    source = BatchSource(digits, torch.device("cpu"), seed=config.seed)
    modules = {part_name(b): part.module for b, part in parts.items()}
    return train_step(config.train, build_objective(config), source, modules, [parts[block]], block, 4, hardware())


@pytest.mark.parametrize("block", [0, 1, 2])
def test_nothing_else_moves(digits, block):
    """A step on one block leaves the others untouched, and they may as well be NaN."""
    config = make_config()
    parts = {b: build_part(config, part_name(b), torch.device("cpu")) for b in range(3)}

    def snapshot(part):
        tensors = [*part.module.state_dict().values(), *part.ema.values()]
        return [value.clone() for value in tensors], json.dumps(str(part.optimizer.state_dict()["state"])), part.step

    before = {b: snapshot(part) for b, part in parts.items()}
    loss = a_step(config, digits, block, parts)
    for b, part in parts.items():
        after = snapshot(part)
        same = all(torch.equal(x, y) for x, y in zip(before[b][0], after[0], strict=True)) and before[b][1:] == after[1:]
        assert same == (b != block)
        assert b == block or all(parameter.grad is None for parameter in part.module.parameters())

    poisoned = {b: build_part(config, part_name(b), torch.device("cpu")) for b in range(3)}
    for b in poisoned:
        if b != block:
            for parameter in poisoned[b].module.parameters():
                parameter.data.fill_(float("nan"))
    assert torch.equal(a_step(config, digits, block, poisoned), loss)
    for x, y in zip(poisoned[block].module.parameters(), parts[block].module.parameters(), strict=True):
        assert torch.equal(x, y)


def test_micro_batches_change_rounding_only(digits):
    moved = []
    for micro in (None, 3):
        config = make_config(train={"micro_batch": micro})
        parts = {1: build_part(config, "block_1", torch.device("cpu"))}
        losses = [float(a_step(config, digits, 1, parts)) for _ in range(3)]
        moved.append((losses, parts[1].module.state_dict()))
    assert moved[0][0] == pytest.approx(moved[1][0], rel=1e-5)
    assert all(torch.allclose(moved[0][1][key], moved[1][1][key], atol=1e-5) for key in moved[0][1])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("order", ["shuffled", "uniform"])
@pytest.mark.parametrize("at", [1, 4, 7, 10])
def test_resume_is_exact(digits, tmp_path, monkeypatch, at, order):
    """Killed without warning after any step, the same command ends with the bits of a run that was not; the log too."""
    settings = {"block_order": order, "checkpoint_every": 3, "clip_norm": 0.5, "warmup_steps": 2, "schedule": "cosine"}
    whole = fit(make_config(train=settings), digits, tmp_path / "whole")
    step, made = training.train_step, []

    def cut_off(*arguments):
        if len(made) == at:
            raise Killed
        made.append(1)
        return step(*arguments)

    monkeypatch.setattr(training, "train_step", cut_off)
    with pytest.raises(Killed):
        fit(make_config(train=settings), digits, tmp_path / "cut")
    monkeypatch.setattr(training, "train_step", step)
    assert fit(make_config(train=settings), digits, tmp_path / "cut") == whole
    logs = [training.read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    for rows in logs:
        for row in rows:
            del row["seconds"]
    assert logs[0] == logs[1]


def test_checkpoint_before_a_block_has_begun(digits, tmp_path):
    """In sequential order the last blocks wait; without warm-up their rate before the first step is asked for too."""
    settings = {"block_order": "sequential", "checkpoint_every": 3, "warmup_steps": 0}
    assert fit(make_config(train=settings), digits, tmp_path / "one") == fit(make_config(), digits, tmp_path / "two")


def test_more_steps_at_a_constant_rate(digits, tmp_path):
    whole = fit(make_config(train={"steps": 6}), digits, tmp_path / "whole")
    fit(make_config(train={"steps": 4}), digits, tmp_path / "more")
    assert fit(make_config(train={"steps": 6}), digits, tmp_path / "more") == whole


def test_training_learns(digits, tmp_path):
    rows = []
    fit(make_config(train={"steps": 60, "batch_size": 32, "learning_rate": 3e-3, "log_every": 10}), digits, tmp_path, rows)
    for block in range(3):
        losses = [row["loss"] for row in rows if row["block"] == block]
        assert len(losses) == 6 and losses[-1] < 0.98 * losses[0]
    written = training.read_metrics(tmp_path / "metrics.jsonl")
    assert written == rows and {"block", "step", "loss", "rate", "seconds"} == set(rows[0])
    assert (tmp_path / "plots" / "loss.png").stat().st_size > 1000


def test_non_finite_loss_stops_and_keeps_the_last_good(digits, tmp_path, monkeypatch):
    settings = {"checkpoint_every": 3, "log_every": 1}
    step, made = training.train_step, []

    def poisoned(settings_, objective, source, modules, trained, block, *rest):
        made.append(block)
        loss = step(settings_, objective, source, modules, trained, block, *rest)
        return loss * float("nan") if len(made) == 8 else loss

    monkeypatch.setattr(training, "train_step", poisoned)
    with pytest.raises(training.NonFiniteLoss, match=r"block \d or its gradient is not finite at its step 3"):
        fit(make_config(train=settings), digits, tmp_path)
    assert sum(part["step"] for part in read_run(tmp_path)["parts"].values()) == 6
    assert made[7] == int(made[-1])


@pytest.mark.parametrize("limit", [0.5, 2.0, 1e6, float("inf")])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_gradients_are_clipped_as_by_torch(limit, bad):
    """To the bit, with less work; where one gradient is bad the others may stay as they are, and the norm says so."""
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(size)) for size in (3, 40, 1)] for _ in range(2))
    for own, other in zip(ours[:2], theirs[:2], strict=True):  # the last one has no gradient
        own.grad = torch.randn_like(own)
        if bad is not None:
            own.grad[0] = bad
        other.grad = own.grad.clone()
    norm, wanted = training.clip_gradients(ours, limit), torch.nn.utils.clip_grad_norm_(theirs, limit)
    assert torch.equal(norm, wanted) or (norm.isnan() and wanted.isnan())
    if bad is None:
        assert all(torch.equal(own.grad, other.grad) for own, other in zip(ours[:2], theirs[:2], strict=True))
    assert ours[2].grad is None


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_non_finite_gradient_of_a_finite_loss_stops(digits, tmp_path, monkeypatch, clip_norm):
    settings = {"checkpoint_every": 3, "log_every": 100, "clip_norm": clip_norm}
    step, made = training.train_step, []

    def poisoned(settings_, objective, source, modules, trained, *rest):
        made.append(1)
        if len(made) == 7:
            parameter = next(trained[0].module.parameters())
            handle = parameter.register_hook(lambda gradient: gradient + float("inf"))
            loss = step(settings_, objective, source, modules, trained, *rest)
            handle.remove()
            return loss
        return step(settings_, objective, source, modules, trained, *rest)

    monkeypatch.setattr(training, "train_step", poisoned)
    with pytest.raises(training.NonFiniteLoss, match="its gradient"):
        fit(make_config(train=settings), digits, tmp_path)
    run = read_run(tmp_path)
    assert sum(part["step"] for part in run["parts"].values()) == 6
    weights = checkpoint.load_weights(tmp_path, run, "block_0", "raw")
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("moment", ["last step", "last save", "grid"])
def test_signal_at_the_end_is_not_lost(digits, tmp_path, monkeypatch, moment):
    def signal_once(name, original):
        sent = []

        def send(*arguments):
            if not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))
            return original(*arguments)

        return send

    config = make_config(train={"sample_every": 12, "steps": 4})
    if moment == "last save":
        monkeypatch.setattr(checkpoint, "save", signal_once("save", checkpoint.save))
    elif moment == "grid":
        monkeypatch.setattr(training, "ema_modules", signal_once("ema_modules", training.ema_modules))
    else:
        monkeypatch.setattr(training, "train_step", signal_once("train_step", training.train_step))
    with pytest.raises(SystemExit) as stopped:
        fit(config, digits, tmp_path)
    assert stopped.value.code == 128 + signal.SIGTERM
    made = sum(part["step"] for part in read_run(tmp_path)["parts"].values())
    assert made == (1 if moment == "last step" else 12)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("end", ["killed while it scores", "signal"])
def test_what_was_due_at_a_checkpoint_is_not_missed(digits, tmp_path, monkeypatch, end):
    """A run that ends at the step of a checkpoint has that step's score when it has gone on."""
    config, scored, made = make_config(train={"evaluate_every": 6, "checkpoint_every": 6, "steps": 4}), [], []
    step = training.train_step

    def signalled(*arguments):
        made.append(1)
        if len(made) == 6 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    def measure(modules, done):
        if len(made) == 6 and end != "signal":
            raise Killed
        scored.append(done)

    monkeypatch.setattr(training, "train_step", signalled)
    with pytest.raises((Killed, SystemExit)):
        fit(config, digits, tmp_path, measure=measure)
    made.append(1)
    fit(config, digits, tmp_path, measure=measure)
    assert scored == [6, 12]


def test_block_without_steps_is_refused(digits, tmp_path):
    config = make_config(partition={"name": "uniform"}, train={"block_order": "uniform", "block_probability": "mass"})
    with pytest.raises(SettingError, match="would not be trained at all"):
        fit(config, digits, tmp_path)


def test_grids_at_intervals(digits, tmp_path):
    fit(make_config(train={"sample_every": 6}), digits, tmp_path)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step_000000006.png", "step_000000012.png"]


@pytest.mark.parametrize("total", [1, 7, 300])
@pytest.mark.parametrize("shares", [EQUAL, [0.7, 0.25, 0.05], [0.99998, 1e-5, 1e-5]])
@pytest.mark.parametrize("order", ["shuffled", "sequential", "uniform"])
def test_orders_have_their_counts(order, shares, total):
    if order != "uniform" and total < 3:
        return
    counts = update_counts(0, order, shares, total)
    blocks = update_order(0, order, shares, total)
    assert sum(counts) == total == len(blocks)
    assert np.bincount(blocks, minlength=3).tolist() == counts
    if order != "uniform":
        assert min(counts) >= 1
        assert all(
            abs(count - share * total) <= 1 or count == 1 or max(counts) == count
            for count, share in zip(counts, shares, strict=True)
        )
    if order == "sequential":
        assert (np.diff(blocks) >= 0).all()


def test_shuffled_rounds_visit_every_block_once():
    blocks = update_order(3, "shuffled", EQUAL, 300).reshape(100, 3)
    assert all(sorted(round_) == [0, 1, 2] for round_ in blocks.tolist())
    assert len({tuple(round_) for round_ in blocks.tolist()}) == 6
    assert (blocks != update_order(4, "shuffled", EQUAL, 300).reshape(100, 3)).any()


def test_uniform_draws_have_their_distribution():
    blocks = update_order(0, "uniform", [0.5, 0.3, 0.2], 20_000)
    assert np.bincount(blocks) / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_mass_follows_the_partition():
    config = make_config(partition={"name": "log_uniform"}, train={"block_probability": "mass", "steps": 100})
    shares = training.block_shares(config, build_objective(config))
    assert update_counts(0, "shuffled", shares, 300) == [13, 254, 33]  # masses .043801, .847858, .108341


def test_learning_rate():
    constant = TrainConfig(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate(constant, step, 10) for step in (0, 1, 3, 4, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = TrainConfig(learning_rate=2.0, schedule="cosine")
    assert learning_rate(cosine, 0, 10) == 2 and learning_rate(cosine, 5, 10) == pytest.approx(1)
    assert learning_rate(cosine, 10, 10) == pytest.approx(0)


def test_ema_decay():
    settings = TrainConfig(batch_size=100, ema_half_life=1000, ema_rampup=0.05)
    assert ema_decay(settings, 0) == 0  # the first average is the first weights
    assert ema_decay(settings, 100) == pytest.approx(0.5 ** (100 / 500))  # 10,000 images seen
    assert ema_decay(settings, 10_000) == pytest.approx(0.5**0.1)
    assert ema_decay(dataclasses.replace(settings, ema_half_life=0), 5) == 0
    assert ema_decay(dataclasses.replace(settings, ema_rampup=None), 0) == pytest.approx(0.5**0.1)


def test_ema_is_the_average(digits):
    config = make_config(train={"ema_half_life": 40, "ema_rampup": None})
    parts = {0: build_part(config, "block_0", torch.device("cpu"))}
    name, parameter = "head.linear.weight", parts[0].module.head.linear.weight
    expected, decay = parameter.detach().clone(), 0.5 ** (8 / 40)
    for _ in range(3):
        a_step(config, digits, 0, parts)
        expected = decay * expected + (1 - decay) * parameter.detach()
    assert torch.allclose(parts[0].ema[name], expected, atol=1e-7)
    assert not torch.equal(parts[0].ema[name], parameter)


def test_state_of_a_block_job():
    """A job that owns one block builds one block: parameters, EMA and optimizer state, counted in bytes, at DiT-S/2."""
    at_cifar10 = {
        "model": {"size": "S", "patch_size": 2, "depth": 12, "width": 384, "heads": 6},
        "data": {"size": 32, "channels": 3},
    }
    at_digits = {"model": {"patch_size": 2, "depth": 12, "width": 64}}

    def training_bytes(num_blocks: int, groups: dict) -> int:
        config = make_config(**groups, partition={"num_blocks": num_blocks})
        part = build_part(config, "block_0", torch.device("cpu"))
        for parameter in part.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        part.optimizer.step()
        held = [*part.module.parameters(), *(p.grad for p in part.module.parameters()), *part.ema.values()]
        held += [value for state in part.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return sum(value.numel() * value.element_size() for value in held)

    for num_blocks in (2, 3, 4, 6):
        share, digits_share = (
            training_bytes(num_blocks, groups) / training_bytes(1, groups) for groups in (at_cifar10, at_digits)
        )
        print(f"{num_blocks} blocks: {share * num_blocks:.3f}/{num_blocks} at DiT-S/2, {digits_share * num_blocks:.3f} at digits")
        assert share <= 1.1 / num_blocks


def test_checkpoint_without_room_to_continue_is_whole(digits, tmp_path, monkeypatch):
    """Cut off while a checkpoint is written, the previous one holds; what is left of the new one is cleared away."""
    whole = fit(make_config(), digits, tmp_path / "whole")
    fit(make_config(train={"steps": 2}), digits, tmp_path / "cut")
    before = state(tmp_path / "cut")
    for call in ("commit_generation", "write_atomically"):
        original = getattr(checkpoint, call)

        def fail(path, *rest, original=original, call=call):
            if call == "commit_generation" or path.name == "run.json":
                raise Killed
            return original(path, *rest)

        monkeypatch.setattr(checkpoint, call, fail)
        with pytest.raises(Killed):
            fit(make_config(), digits, tmp_path / "cut")
        monkeypatch.setattr(checkpoint, call, original)
        assert state(tmp_path / "cut") == before
    assert fit(make_config(), digits, tmp_path / "cut") == whole
    assert len(list((tmp_path / "cut" / "checkpoint").iterdir())) == 2  # run.json and one generation
    shutil.rmtree(tmp_path / "cut")


def test_runs_keep_every_step_and_their_order():
    order = update_order(0, "shuffled", EQUAL, 30)
    runs = training.in_runs(order, 4)
    assert np.bincount(runs).tolist() == [10] * 3
    assert np.count_nonzero(np.diff(runs)) <= 8  # runs of 4, 4 and 2 steps
    assert (training.in_runs(order, 1) == order).all()
    unequal = training.in_runs(update_order(0, "shuffled", [0.7, 0.25, 0.05], 100), 10)
    assert np.bincount(unequal).tolist() == [70, 25, 5]


@pytest.mark.parametrize("kind", ["dit", "vit", "shared"])
def test_offload_holds_one_block_and_changes_no_bit(digits, tmp_path, monkeypatch, kind):
    """The host stands in for the device: what is moved when, in runs; interrupted and resumed too."""
    make, also = make_config if kind == "dit" else make_classifier, []
    if kind == "shared":
        make, also = functools.partial(make_classifier, model={"share": "ends"}), ["shared"]
    every = {"train": {"steps": 4, "switch_every": 1 if kind != "shared" else 2}}
    whole = fit(make(**every), digits, tmp_path / "whole")
    moves = []
    monkeypatch.setattr(training, "make_resident", lambda parts, names, device: moves.append(names))
    settings = {"offload": True, "switch_every": 2, "block_order": "sequential"}
    assert fit(make(train={**settings, "steps": 4}), digits, tmp_path / "offload") != {}
    assert moves == [["block_0", *also], ["block_1", *also], ["block_2", *also]]
    moves.clear()
    evaluate = {"sample_every": 6} if kind == "dit" else {"evaluate_every": 6}
    assert fit(make(train={"steps": 4, "offload": True, "switch_every": 2, **evaluate}), digits, tmp_path / "runs") == whole
    assert len(moves) == 6 and all(names[1:] == also for names in moves)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (make_config, False),
        (make_classifier, False),
        (functools.partial(make_classifier, model={"share": "ends"}), True),
        (functools.partial(make_classifier, objective={"table": "learned"}), True),
        (functools.partial(make_classifier, "noprop_dt", network="noprop_cnn"), True),
    ],
)
def test_whose_turn_it_is_names_a_run_where_blocks_share_something(make, named):
    """Its order of steps is another training; without anything shared no bit moves, and the run is the same."""
    found = [configuration.run_folder(make(train={"switch_every": every})) for every in (1, 2)]
    assert (found[0] != found[1]) == named
    assert "switch_every" not in configuration.trained_identity(make())["train"]


def test_a_part_moves_as_a_whole(digits, monkeypatch):
    """Nothing that a part holds between steps stays where it was; a copy stands in for the other side."""
    config = make_config()
    parts = {b: build_part(config, part_name(b), torch.device("cpu")) for b in range(3)}
    a_step(config, digits, 1, parts)

    def held():
        part = parts[1]
        tensors = [*part.module.parameters(), *part.module.buffers(), *part.ema.values()]
        return tensors + [value for state in part.optimizer.state.values() for value in state.values()]

    before = [(value.data_ptr(), value.clone()) for value in held()]
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where, **how: self.clone())
    training.make_resident({part_name(b): part for b, part in parts.items()}, ["block_1"], torch.device("cpu"))
    after = held()
    assert len(after) == len(before) > 5 * len(list(parts[1].module.parameters()))
    assert all(value.data_ptr() != old for value, (old, _) in zip(after, before, strict=True))
    assert all(torch.equal(value, old) for value, (_, old) in zip(after, before, strict=True))
    assert all(parameter.grad is None for parameter in parts[1].module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_changes_no_bit(digits, tmp_path, precision):
    settings = {"precision": precision, "steps": 2}
    whole = fit(make_config(train=settings), digits, tmp_path / "whole")
    assert fit(make_config(train={**settings, "activation_checkpointing": True}), digits, tmp_path / "recomputed") == whole


def test_blocks_of_one_shape_share_one_compiled_graph(digits):
    """Traced without kernels, which a compiler would take half a minute for; with checkpointing too."""
    for checkpointing in (False, True):
        config = make_config(train={"activation_checkpointing": checkpointing})
        parts = {b: build_part(config, part_name(b), torch.device("cpu")) for b in range(3)}
        expected = [part.module.state_dict() for part in parts.values()]
        torch._dynamo.reset()
        graphs = []

        def count(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        source = BatchSource(digits, torch.device("cpu"), seed=config.seed)
        modules = {part_name(b): torch.compile(part.module, backend=count, dynamic=False) for b, part in parts.items()}
        for block in (0, 1, 2, 1):
            own = [parts[block]]
            train_step(config.train, build_objective(config), source, modules, own, block, 4, hardware())
        assert len(graphs) == 1
        assert all(key in expected[0] for key in parts[0].module.state_dict())


def test_what_the_machine_cannot_do_is_refused(monkeypatch):
    with pytest.raises(SettingError, match="train.offload=true moves"):
        training.check(make_config(train={"offload": True}), hardware())
    with pytest.raises(SettingError, match="nothing to offload"):
        make_config(train={"offload": True, "blocks": [1]})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SettingError, match="train.compile=true finds no compiler"):
        training.check(make_config(train={"compile": True}), hardware())
    training.check(make_config(train={"activation_checkpointing": True}), hardware())
    with pytest.raises(SettingError, match="activation_checkpointing=true keeps inputs of layers, which model=noprop_cnn has"):
        training.check(make_classifier(network="noprop_cnn", train={"activation_checkpointing": True}), hardware())
