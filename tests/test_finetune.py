"""Fine-tuning in blocks: jobs apart equal a job together, resume, merge, several processes, from files to an image."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from conftest import ROOT
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    DiTPipeline,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusion3Pipeline,
)
from families import autoencoder, build
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import checkpoint
import experiments.finetune as finetune
from config import MergeConfig, SettingError
from convert import SHARED, ConvertConfig, LevelsConfig, convert
from experiments.finetune import (
    FinetuneConfig,
    FinetuneObjective,
    encode_images,
    find_images,
    load,
    load_pipeline,
    read_embeddings,
    read_image,
    run,
)
from model import Draw
from train import NonFiniteLoss, train_step

PROMPTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Stable Diffusion 3 that takes embeddings for prompts."""
    folder = tmp_path_factory.mktemp("sd3")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    model = build("SD3Transformer2DModel")
    StableDiffusion3Pipeline(transformer=model, scheduler=scheduler, vae=autoencoder(), **dict.fromkeys(PROMPTS)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny DiT."""
    folder = tmp_path_factory.mktemp("dit")
    model = build("DiTTransformer2DModel", num_embeds_ada_norm=1000)
    DiTPipeline(transformer=model, scheduler=DDIMScheduler(), vae=autoencoder()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 10 samples for the tiny Stable Diffusion 3."""
    folder = tmp_path_factory.mktemp("embeddings")
    torch.manual_seed(3)
    shapes = {"hidden_states": (4, 8, 8), "encoder_hidden_states": (8, 24), "pooled_projections": (12,)}
    save_file({name: torch.randn(10, *shape) for name, shape in shapes.items()}, folder / "samples.safetensors")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two labels of three pictures each."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for index in range(3):
            Image.fromarray(draw.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(folder / label / f"{index}.png")
    return folder


def job(model: Path, data: Path, out: Path, **changes: Any) -> FinetuneConfig:
    """A small job over two blocks on one thread."""
    blocks = ConvertConfig(layers_per_block=2, levels=LevelsConfig(**changes.pop("levels", {})))
    small = {"steps": 3, "batch_size": 4, "learning_rate": 1e-2, "lora_rank": 2, "image_size": 16, "precision": "fp32"}
    small |= {"device": "cpu", "threads": 1, "measure": False}
    return FinetuneConfig(str(model), str(data), blocks, folder=str(out), **{**small, **changes})


def weights(folder: Path) -> dict[str, Tensor]:
    """Returns every trained tensor of a job's checkpoint."""
    run_file = checkpoint.read_run(folder)
    return {
        f"{part}/{name}": value
        for part in run_file["parts"]
        for name, value in checkpoint.load_weights(folder, run_file, part, "raw").items()
    }


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("lora_rank", [2, None], ids=["lora", "full"])
def test_single_block_jobs_merged_equal_one_job(sd3: Path, embeddings: Path, tmp_path: Path, lora_rank: int | None) -> None:
    run(job(sd3, embeddings, tmp_path / "together", lora_rank=lora_rank))
    for block in (0, 1):
        run(job(sd3, embeddings, tmp_path / f"{block}", lora_rank=lora_rank, blocks_to_train=[block]))
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    run(job(sd3, embeddings, tmp_path / "merged", merge=MergeConfig(folders)))
    assert same(tmp_path / "together", tmp_path / "merged")
    start, trained = load(tmp_path / "merged").transformer, load(tmp_path / "together").transformer
    assert all(torch.equal(p, q) for p, q in zip(start.state_dict().values(), trained.state_dict().values(), strict=True))


def test_jobs_join_by_ownership(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path / "0", lora_rank=None, blocks_to_train=[0], train_shared=True))
    run(job(sd3, embeddings, tmp_path / "1", lora_rank=None, blocks_to_train=[1]))
    run(job(sd3, embeddings, tmp_path / "1shared", lora_rank=None, blocks_to_train=[1], train_shared=True))
    paths = {name: str(tmp_path / name) for name in ("0", "1", "1shared")}
    with pytest.raises(SettingError, match="shared is in"):
        run(job(sd3, embeddings, tmp_path / "twice", merge=MergeConfig([paths["0"], paths["1shared"]])))
    with pytest.raises(SettingError, match="the model has block_0, block_1, shared"):
        run(job(sd3, embeddings, tmp_path / "gap", merge=MergeConfig([paths["0"]])))
    with pytest.raises(SettingError, match="block_1 is in"):
        run(job(sd3, embeddings, tmp_path / "double", merge=MergeConfig([paths["1"], paths["1"]])))
    run(job(sd3, embeddings, tmp_path / "all", merge=MergeConfig([paths["0"], paths["1"]])))
    assert set(checkpoint.read_run(tmp_path / "all")["parts"]) == {"block_0", "block_1", SHARED}


def test_jobs_of_unlike_machines_join_only_if_forced(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path / "0", blocks_to_train=[0]))
    run(job(sd3, embeddings, tmp_path / "1", blocks_to_train=[1], threads=2))
    torch.set_num_threads(1)
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    with pytest.raises(SettingError, match=r"threads.*merge\.force=true joins them"):
        run(job(sd3, embeddings, tmp_path / "all", merge=MergeConfig(folders)))
    run(job(sd3, embeddings, tmp_path / "all", merge=MergeConfig(folders, force=True)))
    load(tmp_path / "all")


def test_no_optimizer_state_for_what_is_not_owned(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path, blocks_to_train=[1]))
    run_file = checkpoint.read_run(tmp_path)
    assert list(run_file["parts"]) == ["block_1"]
    names = set(weights(tmp_path))
    assert names and all("lora" in name and ("/2/" in name or "/3/" in name) for name in names)
    state = torch.load(checkpoint.part_file(tmp_path, run_file, "block_1", "optimizer"), weights_only=True)
    assert len(state["state"]) == len(names)


def test_resume_is_exact(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path / "whole", steps=4))
    run(job(sd3, embeddings, tmp_path / "halves", steps=2))
    run(job(sd3, embeddings, tmp_path / "halves", steps=4))
    steps = {part: entry["step"] for part, entry in checkpoint.read_run(tmp_path / "halves")["parts"].items()}
    assert steps == {"block_0": 4, "block_1": 4}
    # Which block comes next is drawn for the number of steps, but a block's own steps do not depend on it.
    assert same(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"blocks_to_train": [0]}, r"train\.blocks"),
        ({"levels": {"name": "logit_normal"}}, r"blocks\.options\.levels\.name"),
        ({"blocks": ConvertConfig(1)}, r"blocks\.boundaries"),
        ({"blocks": ConvertConfig(2, block_paths=["transformer_blocks"])}, r"blocks\.options\.block_paths"),
        ({"blocks": ConvertConfig(2, partition="custom", boundaries=[0, 0.4, 1])}, r"blocks\.boundaries"),
        ({"lora_rank": 4}, r"train\.lora_rank"),
        ({"seed": 1}, "seed"),
        ({"train_shared": True, "lora_targets": ["to_q", "to_k", "proj_out"]}, r"train\.lora_targets"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_resume_with_something_else_names_the_field(
    sd3: Path, embeddings: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    run(job(sd3, embeddings, tmp_path, steps=1))
    blocks = changes.pop("blocks", None)
    other = job(sd3, embeddings, tmp_path, steps=1, **changes)
    with pytest.raises(SettingError, match=field):
        run(dataclasses.replace(other, blocks=blocks) if blocks else other)


def test_resume_with_another_shared_part_is_refused(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path, steps=1, lora_rank=None))
    with pytest.raises(SettingError, match="train_shared=True"):
        run(job(sd3, embeddings, tmp_path, steps=1, lora_rank=None, train_shared=True))


def test_from_pictures_to_a_picture(dit: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Labels, a DDPM scheduler, adapters; the report of what it costs; then an image through the trained blocks."""
    run(job(dit, pictures, tmp_path, measure=True, lora_rank=None))
    report = capsys.readouterr().out.splitlines()
    memory = [float(line.split("peak memory ")[1].split()[0]) for line in report]
    assert [line.split(":")[0] for line in report] == ["with blocks", "without blocks"]
    assert memory[0] < memory[1]
    pipe = load(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    ran = families.watch(pipe.transformer._diffusion_blocks)
    assert pipe([1], num_inference_steps=4, output_type="np").images.shape == (1, 16, 16, 3)
    assert set(ran) == {0, 1, 2, 3}


def test_part_of_a_model_draws_only_if_forced(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path, blocks_to_train=[0]))
    with pytest.raises(SettingError, match=r"blocks \[1\] were not trained"):
        load(tmp_path)
    load(tmp_path, force=True)


@pytest.mark.parametrize(
    "name",
    sorted(
        set(families.MODELS)
        & {
            "ZImageTransformer2DModel",
            "QwenImageTransformer2DModel",
            "LTXVideoTransformer3DModel",
            "Lumina2Transformer2DModel",
            "MochiTransformer3DModel",
        }
    ),
)
def test_the_loss_reaches_every_trained_parameter(name: str) -> None:
    """Any converted model: arguments that are lists, that do not vary, clocks that run from noise to data."""
    blocks = convert(build(name), 2)
    arguments = families.inputs(name)
    sample = next(iter(arguments))
    batched = {key: value for key, value in arguments.items() if isinstance(value, Tensor) and key not in ("timestep", "t")}
    batched |= {key: torch.stack(arguments[key]) for key in ("x", "cap_feats") if key in arguments}
    constants = {key: value for key, value in arguments.items() if isinstance(value, int)}
    constants |= {"img_shapes": [[1, 4, 4]]} if "img_shapes" in arguments else {}
    names = (sample, *sorted(set(batched) - {sample}))
    objective = FinetuneObjective(blocks, FlowMatchEulerDiscreteScheduler(), names, constants, seed=0)
    loss = objective.training_loss({}, tuple(batched[key] for key in names), Draw(1, 0, 2, slice(0, 2)), None)
    assert loss.shape == (2,)
    loss.sum().backward()
    received = {key for key, p in blocks.transformer.named_parameters() if p.grad is not None and blocks.owner(key) == "block_1"}
    assert received


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_what_a_ddpm_model_predicts_gives_the_data_back(prediction: str) -> None:
    scheduler = DDIMScheduler(prediction_type=prediction, clip_sample=False)
    blocks = convert(build("DiTTransformer2DModel"), 2, scheduler=scheduler)
    objective = FinetuneObjective(blocks, scheduler, ("hidden_states",), {}, seed=0)
    x, noise = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    z, target = objective.add_noise(x, torch.full((2,), 0.4, dtype=torch.float64), noise)
    torch.testing.assert_close(z, scheduler.add_noise(x, noise, torch.tensor([400, 400])))
    scheduler.set_timesteps(10)
    torch.testing.assert_close(scheduler.step(target, 400, z).pred_original_sample, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("clock", "sign"), [("sigma", 1.0), ("sigma_from_noise", -1.0)])
def test_what_a_flow_model_predicts_is_its_velocity_on_its_own_clock(clock: str, sign: float) -> None:
    blocks = convert(build("FluxTransformer2DModel"), 2, clock=clock)
    objective = FinetuneObjective(blocks, None, ("hidden_states",), {}, seed=0)
    x, noise = torch.randn(2, 16, 4), torch.randn(2, 16, 4)
    z, target = objective.add_noise(x, torch.tensor([0.3, 0.3], dtype=torch.float64), noise)
    torch.testing.assert_close(z - 0.3 * sign * target, x)


Signal = tuple[int, int, int]  # after how many steps, its number, to which process


def share(rank: int, processes: int, port: int, config: FinetuneConfig, sent: Signal | None) -> None:
    """One of some processes, as torch's launcher starts them, which may send itself a signal."""
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    count = itertools.count(1)

    def stepped(*args: Any, **kwargs: Any) -> Tensor:
        loss = train_step(*args, **kwargs)
        if sent is not None and sent == (next(count), sent[1], rank):
            os.kill(os.getpid(), sent[1])
        return loss

    finetune.train_step = stepped
    run(config)


def run_apart(config: FinetuneConfig, processes: int, sent: Signal | None = None) -> list[int | None]:
    """Runs a job in one fresh process or two and returns how they ended; forks would inherit locks of the tests' threads."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    fresh = multiprocessing.get_context("spawn")
    started = [fresh.Process(target=share, args=(rank, processes, port, config, sent)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def assert_close(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora_rank", [2, None], ids=["lora", "full"])
def test_two_processes_equal_one_within_rounding(sd3: Path, embeddings: Path, tmp_path: Path, lora_rank: int | None) -> None:
    """Nothing looks for unused parameters, though a step trains one of the job's two blocks."""
    run(job(sd3, embeddings, tmp_path / "one", lora_rank=lora_rank, learning_rate=1e-3, micro_batch=1))
    config = job(sd3, embeddings, tmp_path / "two", lora_rank=lora_rank, learning_rate=1e-3, micro_batch=1)
    assert run_apart(config, 2) == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_job_goes_on_to_the_bit(sd3: Path, embeddings: Path, tmp_path: Path, number: int) -> None:
    run(job(sd3, embeddings, tmp_path / "whole"))
    config = job(sd3, embeddings, tmp_path / "killed", checkpoint_every=2)
    assert run_apart(config, 1, (3, number, 0)) == [-number if number == signal.SIGKILL else 128 + number]
    made = sum(part["step"] for part in checkpoint.read_run(tmp_path / "killed")["parts"].values())
    assert made == (2 if number == signal.SIGKILL else 3)
    run(config)
    assert same(tmp_path / "whole", tmp_path / "killed")


def test_a_signal_to_one_process_stops_both(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    run(job(sd3, embeddings, tmp_path / "one"))
    config = job(sd3, embeddings, tmp_path / "two")
    assert run_apart(config, 2, (3, signal.SIGTERM, 1)) == [128 + signal.SIGTERM] * 2
    assert run_apart(config, 2) == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two")


def test_a_loss_that_is_not_finite_stops_every_process_and_keeps_the_last_good(
    sd3: Path, embeddings: Path, tmp_path: Path
) -> None:
    run(job(sd3, embeddings, tmp_path / "run", steps=1))
    before = weights(tmp_path / "run")
    broken = job(sd3, embeddings, tmp_path / "run", steps=4, learning_rate=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FinetuneObjective,
            "training_loss",
            lambda self, modules, batch, draw, autocast: batch[0].new_full((4,), math.nan, requires_grad=True),
        )
        with pytest.raises(NonFiniteLoss, match="block [01] or its gradient is not finite at its step 2"):
            run(broken)
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "run").items())


def composed(*overrides: str) -> FinetuneConfig:
    """Returns what the script composes of its command line."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_object(compose("finetune", [*overrides]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps=0 must be at least 1"),
        ("blocks.overlap=0.7", "overlap=0.7"),
        ("blocks_to_train=[5]", "blocks_to_train=[5]"),
        ("pipeline=/nowhere", "pipeline=/nowhere is not a diffusers pipeline"),
        ("samples=/nowhere", "samples=/nowhere is not a folder"),
        ("lora_targets=[nothing]", "lora_targets="),
        ("lora_targets=[]", "lora_targets=[]"),
        ("learning_rate=nan", "learning_rate=nan"),
        ("weight_decay=nan", "weight_decay=nan"),
        ("precision=fp8", "precision=fp8"),
        ("threads=0", "threads=0"),
        ("device=tpu", "device=tpu"),
        ("blocks_to_train=[[0]]", "blocks_to_train=[[0]]"),
        ("merge.runs=[/nowhere]", "merge.runs: /nowhere holds no checkpoint"),
    ],
)
def test_a_wrong_setting_is_one_sentence(sd3: Path, embeddings: Path, tmp_path: Path, override: str, message: str) -> None:
    usual = [
        f"pipeline={sd3}",
        f"samples={embeddings}",
        f"folder={tmp_path}",
        "blocks.layers_per_block=2",
        "device=cpu",
        "threads=1",
    ]
    with pytest.raises(SettingError) as error:
        run(composed(*usual, override))
    assert message in str(error.value)


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigCompositionException, match="layer_per_block"):
        composed("pipeline=a", "samples=b", "blocks.layer_per_block=2")


def test_embeddings_that_do_not_fit_are_named(sd3: Path, tmp_path: Path) -> None:
    model = build("SD3Transformer2DModel")
    save_file({"hidden_states": torch.zeros(2, 4, 8, 8), "text": torch.zeros(2, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(SettingError, match="forward has no text"):
        read_embeddings(tmp_path, model)
    save_file({"encoder_hidden_states": torch.zeros(2, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(SettingError, match="has no hidden_states"):
        read_embeddings(tmp_path, model)
    save_file({"hidden_states": torch.zeros(2, 4, 8, 8), "pooled_projections": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(SettingError, match="numbers of samples differ"):
        read_embeddings(tmp_path, model)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    model, one = build("SD3Transformer2DModel"), {"hidden_states": torch.zeros(2, 4, 8, 8)}
    for name, second in (
        ("names", {"encoder_hidden_states": torch.zeros(2, 3)}),
        ("shapes", {"hidden_states": torch.zeros(2, 4, 4, 4)}),
    ):
        (tmp_path / name).mkdir()
        save_file(one, tmp_path / name / "a.safetensors")
        save_file(second, tmp_path / name / "b.safetensors")
        with pytest.raises(SettingError, match=r"b\.safetensors holds other tensors"):
            read_embeddings(tmp_path / name, model)
    save_file({"hidden_states": torch.zeros(0, 4, 8, 8)}, tmp_path / "a.safetensors")
    with pytest.raises(SettingError, match="holds no samples"):
        read_embeddings(tmp_path, model)
    for text in ("{", "[1]"):
        (tmp_path / "arguments.json").write_text(text)
        with pytest.raises(SettingError, match=r"arguments\.json cannot be read"):
            read_embeddings(tmp_path, model)
    (tmp_path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(SettingError, match=r"a\.safetensors cannot be read"):
        read_embeddings(tmp_path, model)
    (tmp_path / "metadata.jsonl").write_text("[1]")
    with pytest.raises(SettingError, match=r"metadata\.jsonl cannot be read"):
        find_images(tmp_path)
    (tmp_path / "a.png").write_bytes(b"no")
    with pytest.raises(SettingError, match=r"a\.png cannot be read"):
        read_image(tmp_path / "a.png", 8)


def test_embeddings_in_half_precision_train(sd3: Path, embeddings: Path, tmp_path: Path) -> None:
    halves = {name: tensor.half() for name, tensor in load_file(next(embeddings.glob("*.safetensors"))).items()}
    (tmp_path / "half").mkdir()
    save_file(halves, tmp_path / "half" / "a.safetensors")
    run(job(sd3, tmp_path / "half", tmp_path / "run", steps=1))


def test_a_pipeline_without_a_transformer_is_refused(tmp_path: Path) -> None:
    DDPMPipeline(build("UNet2DModel"), DDIMScheduler()).save_pretrained(tmp_path)
    with pytest.raises(SettingError, match="DDPMPipeline, which has no transformer"):
        load_pipeline(str(tmp_path))


def test_captions_are_embedded_by_the_pipeline(sd3: Path, pictures: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(str(sd3))
    pipe.encode_prompt = lambda prompt, prompt_2, prompt_3, do_classifier_free_guidance: (
        torch.ones(len(prompt), 8, 24),
        None,
        torch.ones(len(prompt), 12),
        None,
    )
    rows = [{"file_name": str(path), "text": path.stem} for path in sorted(pictures.glob("*/*.png"))]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tensors, constants = encode_images(pipe, tmp_path, size=16, batch_size=4)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {"hidden_states": (6, 4, 8, 8), "encoder_hidden_states": (6, 8, 24), "pooled_projections": (6, 12)}
    assert constants == {}


def test_labels_are_numbered_in_order_of_their_names(pictures: Path) -> None:
    paths, captions, labels = find_images(pictures)
    assert [path.parent.name for path in paths] == ["cat"] * 3 + ["dog"] * 3
    assert captions is None
    assert labels == [0, 0, 0, 1, 1, 1]
