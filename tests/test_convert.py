"""Transformers of diffusers as blocks: which layers run, at which level, what trains, what is saved, what is refused."""

import copy
import math
from pathlib import Path
from typing import Any

import diffusers
import families
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import make_config
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiTPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    StableDiffusion3Pipeline,
)
from families import autoencoder, build, inputs, output, watch
from peft import LoraConfig
from test_train import fit
from torch import Tensor, nn

from checkpoint import load_weights, read_run
from config import SettingError
from convert import (
    SHARED,
    LevelsConfig,
    clip_routes,
    convert,
    join_rows,
    level_distribution,
    measure_layers,
    read_clock,
    starting_weights,
)
from data import ImageData
from experiments.finetune import SavedBytes


def flux(**changes: Any) -> nn.Module:
    """A tiny Flux with two layers of two streams and four of one."""
    return build("FluxTransformer2DModel", **{"num_single_layers": 4, **changes})


def adapters(model: nn.Module) -> None:
    """Adds random LoRA adapters to every layer, all else frozen."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "proj_out"], init_lora_weights=False))


def clone(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**arguments, **changes}


# ---------------------------------------------------------------------------------------------------------------------
# Families


def test_families_table_is_what_the_models_do() -> None:
    """Builds and converts every family; see families.check for what `works` means."""
    assert families.table() == families.DOCUMENT.read_text()


APART = sorted(set(families.MODELS) - {"ZImageTransformer2DModel"})  # that takes lists, see below


@pytest.mark.parametrize("batch_size", [2, 3, 8])  # 8: as many as there are tokens of text
@pytest.mark.parametrize("name", APART)
def test_split_batches_equal_the_blocks_apart(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that mixes blocks gives each sample what it gets in a batch of its own block."""
    monkeypatch.setattr(families, "BATCH", batch_size)
    model = build(name)
    try:
        blocks = convert(model, 2)
    except SettingError:
        return  # refused, with the reason in the table
    high, low = inputs(name, 0.7), inputs(name, 0.2)
    even = torch.arange(batch_size) % 2 == 0
    mixed = clone(high, timestep=torch.where(even, high["timestep"], low["timestep"]))
    with torch.no_grad():
        together = output(model, mixed)
        with blocks.training(0):
            noisy = output(model, mixed)
        with blocks.training(1):
            clean = output(model, mixed)
    apart = torch.where(even.reshape(-1, *[1] * (noisy.ndim - 1)), noisy, clean)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)


def test_outputs_that_are_no_samples_cannot_be_joined() -> None:
    rows = [[0, 2], [1]]
    assert torch.equal(join_rows([(torch.tensor([0, 2]),), (torch.tensor([1]),)], rows)[0], torch.arange(3))
    with pytest.raises(SettingError, match="returns 2 rows for 1 samples"):
        join_rows([torch.tensor([0, 2]), torch.tensor([1, 1])], rows)


def test_samples_in_lists_are_split_too() -> None:
    model = build("ZImageTransformer2DModel")
    convert(model, 2)
    arguments = inputs("ZImageTransformer2DModel")
    with torch.no_grad():
        alike = output(model, arguments)
        mixed = output(model, clone(arguments, t=torch.stack([arguments["t"][0], torch.tensor(0.9)])))
    torch.testing.assert_close(mixed[0], alike[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(mixed[1], alike[1])


# ---------------------------------------------------------------------------------------------------------------------
# The model stays the model


def test_state_dict_keys_and_values_stay() -> None:
    model = flux()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    convert(model, 3)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert len(model.single_transformer_blocks) == 4
    assert isinstance(model, FluxTransformer2DModel)


def test_undo_gives_the_model_back() -> None:
    model, untouched = flux(), flux()
    convert(model, 3).undo()
    assert type(model) is FluxTransformer2DModel
    assert type(model.transformer_blocks) is nn.ModuleList
    assert "forward" not in vars(model)
    assert dict(model.config) == dict(untouched.config)
    arguments = inputs("FluxTransformer2DModel")
    with torch.no_grad():
        assert torch.equal(output(model, arguments), output(untouched, arguments))


def test_a_deep_copy_routes_by_itself() -> None:
    model = flux()
    blocks = convert(model, 3)
    twin = copy.deepcopy(model)
    ran = watch(twin._diffusion_blocks)
    with blocks.training(1), torch.no_grad():
        output(twin, inputs("FluxTransformer2DModel", 0.9))
    assert ran == [0, 1, 2]


def test_saved_blocks_are_read_back(tmp_path: Path) -> None:
    model = flux()
    levels = LevelsConfig("logit_normal", mean=0.4)
    blocks = convert(model, 2, levels=levels, overlap=0.1, always_run=[0])
    with blocks.training(1):
        pass
    model.save_pretrained(tmp_path)
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path)
    again = convert(loaded)
    assert again.partition == blocks.partition
    assert again.layers == blocks.layers
    assert again.trained == {1}
    assert again.config == blocks.config
    arguments = inputs("FluxTransformer2DModel", 0.6)
    with torch.no_grad():
        assert torch.equal(output(loaded.eval(), arguments), output(model, arguments))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers_per_block": 3}, "layers"),
        ({"levels": LevelsConfig("beta", alpha=2.0)}, "levels.alpha"),
        ({"overlap": 0.2}, "overlap"),
        ({"block_paths": ["transformer_blocks"]}, "block_paths"),
        ({"scheduler": FlowMatchEulerDiscreteScheduler(num_train_timesteps=500)}, "clock.timesteps"),
    ],
)
def test_other_blocks_than_the_saved_ones_are_refused(change: dict[str, Any], field: str) -> None:
    model = flux()
    saved = convert(model, 2).description()
    other = flux()
    other.register_to_config(diffusion_blocks={**saved, "trained": [0]})
    with pytest.raises(SettingError, match=field):
        convert(other, **{"layers_per_block": 2, **change})


def test_activation_checkpointing_recomputes_the_layers_that_ran() -> None:
    """Forwards of two blocks, then one backward: what is recomputed is settled by then."""
    gradients = []
    for checkpointing in (False, True):
        model = flux().train()
        convert(model, 3)
        if checkpointing:
            model.enable_gradient_checkpointing()
        arguments = inputs("FluxTransformer2DModel")
        torch.manual_seed(0)
        arguments["timestep"] = torch.tensor([0.9, 0.2])
        output(model, inputs_like(arguments)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        same = gradients[1][name] is None if gradient is None else torch.equal(gradient, gradients[1][name])
        assert same, name


def inputs_like(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the same arguments with samples that depend on their shapes alone."""
    fixed = torch.Generator().manual_seed(0)
    moved = {"hidden_states", "encoder_hidden_states", "pooled_projections"}
    return {key: torch.randn(value.shape, generator=fixed) if key in moved else value for key, value in arguments.items()}


@pytest.mark.parametrize("how", ["compile", "compile_repeated_blocks"])
def test_compiled_models_route(how: str) -> None:
    model = flux()
    convert(model, 3)
    arguments = [inputs("FluxTransformer2DModel", level) for level in (0.9, 0.2)]
    with torch.no_grad():
        eager = [output(model, each) for each in arguments]
        getattr(model, how)(backend="eager")
        compiled = [output(model, each) for each in arguments]
    torch._dynamo.reset()
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_group_offloading_works(level: str) -> None:
    model = flux()
    convert(model, 3)
    arguments = inputs("FluxTransformer2DModel")
    with torch.no_grad():
        before = output(model, arguments)
        groups = {"num_blocks_per_group": 1} if level == "block_level" else {}
        cpu = torch.device("cpu")
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=level, **groups)
        assert torch.equal(before, output(model, arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Layers and levels


def test_layers_are_shared_out_evenly_and_some_run_always() -> None:
    assert convert(build("SD3Transformer2DModel", num_layers=7), 3).layers == [[0, 1, 2], [3, 4], [5, 6]]
    model = build("SD3Transformer2DModel", num_layers=8)
    blocks = convert(model, 2, always_run=[0, 1, -2, -1])
    assert blocks.layers == [[2, 3], [4, 5]]
    ran = watch(blocks)
    with torch.no_grad():
        output(model, inputs("SD3Transformer2DModel", 0.2))
    assert ran == [0, 1, 4, 5, 6, 7]
    owned = blocks.freeze([0], train_shared=True)
    assert not any(parameter.requires_grad for parameter in model.transformer_blocks[0].parameters())
    assert set(owned) == {"block_0", SHARED}


def test_layers_by_hand() -> None:
    blocks = convert(flux(), 2, block_paths=["single_transformer_blocks"])
    assert blocks.layers == [[0, 1], [2, 3]]
    assert blocks.owner("transformer_blocks.0.norm1.linear.weight") == SHARED


def test_integer_timestep_one_is_not_sigma_one() -> None:
    blocks = convert(build("SD3Transformer2DModel"), 2)
    assert blocks.owners(torch.tensor([1])) == [1]
    assert blocks.owners(torch.tensor([1, 1000, 499, 501])) == [1, 0, 1, 0]
    with pytest.raises(SettingError, match="clock 'timestep'"):
        blocks.owners(torch.tensor([1001.0]))
    with pytest.raises(SettingError, match="clock 'sigma'"):
        convert(flux(), 3).owners(torch.tensor([500.0]))


@pytest.mark.parametrize(
    "name", ["FluxTransformer2DModel", "SD3Transformer2DModel", "Lumina2Transformer2DModel", "MochiTransformer3DModel"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_value_on_an_edge_belongs_to_the_block_below_in_every_precision(name: str, dtype: torch.dtype) -> None:
    blocks = convert(build(name), 1, levels=LevelsConfig("logit_normal", mean=0.3))
    inner = torch.tensor(blocks.partition.edges[1:-1], dtype=torch.float64)
    assert blocks.owners(blocks.timestep(inner).to(dtype)) == [1, 2, 3]


def test_an_attached_pipeline_is_routed_by_its_own_timesteps() -> None:
    """In bfloat16, 503 and 500 of 1,000 timesteps are 504 and 500; the scheduler says which one was meant."""
    model = flux()
    blocks = convert(model, 3)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[0.9, 0.503, 0.5, 0.1])

    class Pipe:
        transformer = None

    pipe = Pipe()
    pipe.scheduler = scheduler
    blocks.attach(pipe, force=True)
    rounded = scheduler.timesteps.bfloat16() / 1000
    assert blocks.owners(rounded) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "levels",
    [
        LevelsConfig("uniform"),
        LevelsConfig("uniform", shift=3.0),
        LevelsConfig("logit_normal", mean=-0.5, std=1.2, shift=3.0),
        LevelsConfig("mode"),
        LevelsConfig("beta", alpha=0.6, beta=0.8),
        LevelsConfig("list", values=[1000, 1000, 1000, 750, 500, 250]),
        LevelsConfig("weights", weights=[1.0] * 200 + [3.0] * 800),
    ],
    ids=lambda levels: f"{levels.name}-{levels.shift}",
)
def test_training_levels_route_back_to_their_block(levels: LevelsConfig) -> None:
    """Without overlap, what is drawn for a block is what the router gives it; blocks are as probable as the values allow."""
    blocks = convert(build("SD3Transformer2DModel"), 1, levels=levels, overlap=0.0)
    uniform = torch.cat([torch.zeros(1), torch.rand(500, dtype=torch.float64), torch.ones(1) * (1 - 2**-30)]).double()
    for block in range(4):
        drawn = blocks.draw_levels(block, uniform)
        assert set(blocks.owners(blocks.timestep(drawn))) == {block}
    masses = blocks.partition.masses(blocks.distribution)
    assert sum(masses) == pytest.approx(1)
    if levels.name != "list":
        assert masses == pytest.approx([0.25] * 4, abs=1e-3)


def test_whole_timesteps_of_a_ddpm_scheduler() -> None:
    blocks = convert(build("DiTTransformer2DModel"), 1, scheduler=DDPMScheduler(), overlap=0.0)
    assert blocks.partition.masses(blocks.distribution) == pytest.approx([0.25] * 4)
    drawn = blocks.timestep(blocks.draw_levels(1, torch.rand(4000, dtype=torch.float64)))
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == set(range(500, 750))


def test_overlap_in_timestep_and_in_log_snr() -> None:
    blocks = convert(build("SD3Transformer2DModel"), 1, overlap=0.1)
    assert blocks.interval(1) == pytest.approx((0.475, 0.775))
    assert blocks.interval(0) == pytest.approx((0.725, 1.0))
    blocks.undo()
    scheduler = FlowMatchEulerDiscreteScheduler()
    blocks = convert(blocks.transformer, 1, overlap=0.1, overlap_in="log_snr", scheduler=scheduler)
    width = math.log(3)  # of [.5, .75] in logit, half of log-SNR
    assert [math.log(level / (1 - level)) for level in blocks.interval(1)] == pytest.approx([-0.1 * width, 1.1 * width], abs=1e-4)


def test_sigma_and_timestep_of_a_ddpm_scheduler_agree() -> None:
    scheduler = DDPMScheduler()
    clock = read_clock(scheduler)
    for step in (0, 1, 400, 999):
        alpha = scheduler.alphas_cumprod[step].double()
        assert clock.level_of_sigma(((1 - alpha) / alpha).sqrt().item()) * 1000 == pytest.approx(step, abs=1e-3)
    assert read_clock(FlowMatchEulerDiscreteScheduler(shift=3.0)).level_of_sigma(0.25) == 0.25


def test_token_routes_keep_their_indices_and_are_clipped() -> None:
    assert clip_routes([(2, -3), (0, 1)], layers=[4, 5, 6], depth=12) == [(4, 6)]
    assert clip_routes([(2, -3)], layers=[8, 9, 10], depth=12) == [(8, 9)]


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def shares_kept(name: str, num_blocks: int, by_cost: bool = False, **changes: int) -> list[float]:
    """Returns what each block keeps for backward in its layers, as a share of what all layers of the unconverted model keep.

    Args:
        by_cost: whether the layers are shared out by what each was measured to keep, or by their number.
    """
    model = build(name, **changes)
    arguments = inputs(name, 0.7)
    costs = measure_layers(model, arguments)

    def kept() -> int:
        saved = SavedBytes(model)
        with saved.count():
            output(model, arguments).sum().backward()
        return saved.most

    whole = kept()
    blocks = convert(model, -(-len(costs) // num_blocks), layer_costs=costs if by_cost else None)
    assert blocks.num_blocks == num_blocks
    blocks.layers.append([])  # a block without layers, to measure the rest of the model by
    measured = []
    for block in range(num_blocks + 1):
        with blocks.training(block):
            measured.append(kept())
    *own, rest = measured
    return [(share - rest) / (whole - rest) for share in own]


@pytest.mark.parametrize("num_blocks", [2, 3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SD3Transformer2DModel", {"num_layers": 6}),
        ("FluxTransformer2DModel", {"num_layers": 0, "num_single_layers": 6}),
        ("FluxTransformer2DModel", {"num_layers": 6, "num_single_layers": 0}),
    ],
)
def test_every_block_keeps_its_share_of_the_activations(name: str, changes: dict[str, int], num_blocks: int) -> None:
    assert max(shares_kept(name, num_blocks, **changes)) <= 1.05 / num_blocks


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_unequal_layers_are_shared_out_by_what_they_keep(num_blocks: int) -> None:
    """Flux's layers of two streams keep a fifth more than those of one, so blocks of as many layers do not keep alike."""
    stages = {"num_layers": 7, "num_single_layers": 6}
    assert max(shares_kept("FluxTransformer2DModel", num_blocks, **stages)) > 1.05 / num_blocks
    assert max(shares_kept("FluxTransformer2DModel", num_blocks, by_cost=True, **stages)) <= 1.05 / num_blocks


def test_blocks_by_cost_are_read_back(tmp_path: Path) -> None:
    model = flux()
    blocks = convert(model, 2, layer_costs=[1, 1, 1, 1, 1, 9])
    assert blocks.layers == [[0, 1], [2, 3, 4], [5]] or blocks.layers == [[0, 1, 2], [3, 4], [5]]
    model.save_pretrained(tmp_path)
    again = convert(FluxTransformer2DModel.from_pretrained(tmp_path))
    assert (again.layers, again.config) == (blocks.layers, blocks.config)
    with pytest.raises(SettingError, match="layer_costs"):
        convert(FluxTransformer2DModel.from_pretrained(tmp_path), 2)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, twin = flux(), flux()
    costs = measure_layers(model, inputs("FluxTransformer2DModel"))
    assert len(costs) == 6 and min(costs[:2]) > max(costs[2:]) > 0
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    arguments = inputs("FluxTransformer2DModel")
    with torch.no_grad():
        assert torch.equal(output(model, arguments), output(twin, arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Training


def test_freezing_leaves_a_block_and_nothing_thaws() -> None:
    model = flux()
    adapters(model)
    owned = convert(model, 3).freeze([1])
    assert list(owned) == ["block_1"]
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(owned["block_1"])
    assert all("lora" in name for name in trainable)


def test_other_blocks_are_not_even_read() -> None:
    """With every other layer NaN, a block's loss and gradients stay finite."""
    model = flux()
    blocks = convert(model, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if blocks.owner(name) in ("block_0", "block_2"):
                parameter.fill_(float("nan"))
    with blocks.training(1):
        loss = output(model, inputs("FluxTransformer2DModel")).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for name, p in model.named_parameters() if blocks.owner(name) == "block_1")
    assert all(p.grad is None for name, p in model.named_parameters() if blocks.owner(name) in ("block_0", "block_2"))


def test_training_runs_its_block_whatever_the_timesteps() -> None:
    model = flux()
    blocks = convert(model, 3)
    ran = watch(blocks)
    with blocks.training(1), torch.no_grad():
        output(model, inputs("FluxTransformer2DModel", 0.95))
    assert ran == [3, 4, 5]
    assert blocks.trained == {1}


def test_ddp_needs_no_search_for_unused_parameters() -> None:
    """A second forward would fail if a parameter had been left without gradient in the first."""
    model = flux()
    adapters(model)
    blocks = convert(model, 3)
    blocks.freeze([1])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            with blocks.training(1):
                wrapped(**inputs("FluxTransformer2DModel"))[0].square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_of_all_weights_takes_a_static_graph() -> None:
    """The last layer of SD3's block 0 updates a text that nothing reads: those parameters get no gradient, in any step."""
    model = build("SD3Transformer2DModel")
    blocks = convert(model, 2)
    blocks.freeze([0])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=True)
        for _ in range(3):
            with blocks.training(0):
                wrapped(**inputs("SD3Transformer2DModel"))[0].square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    unread = {name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None}
    assert unread and all(
        name.startswith(("transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.ff_context")) for name in unread
    )


def test_accelerate_wraps_a_converted_model() -> None:
    model = flux()
    blocks = convert(model, 3)
    ran = watch(blocks)
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests choose their own precision
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.no_grad():
        output(model, inputs("FluxTransformer2DModel", 0.2))
    assert ran == [3, 4, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Warm start


def test_where_a_block_begins_its_layers() -> None:
    weights = {f"layers.{index}.w": torch.tensor([index]) for index in range(6)} | {"head": torch.tensor([7])}

    def layers(how: str, counts: list[int], given: dict[str, Tensor]) -> list[list[int]]:
        starts = starting_weights(given, how, counts)
        assert all(start["head"] == 7 for start in starts)
        return [
            [start[f"layers.{index}.w"].item() for index in range(count)] for start, count in zip(starts, counts, strict=True)
        ]

    assert layers("slice", [3, 2, 1], weights) == [[0, 1, 2], [3, 4], [5]]
    assert layers("every", [2, 2, 2], weights) == [[1, 4], [1, 4], [1, 4]]
    small = {name: value for name, value in weights.items() if name in ("head", "layers.0.w", "layers.1.w")}
    assert layers("clone", [2, 2, 2], small) == [[0, 1]] * 3
    for how, counts, given in (("slice", [2, 2], weights), ("clone", [2, 1], small), ("clone", [2, 2], weights)):
        with pytest.raises(SettingError, match="train.init_from has"):
            starting_weights(given, how, counts)


@pytest.mark.parametrize(("method", "how"), [("end_to_end", "slice"), ("end_to_end", "every"), ("shallow", "clone")])
def test_blocks_begin_from_a_run(digits: ImageData, tmp_path: Path, method: str, how: str) -> None:
    fit(make_config(method={"name": method}), digits, tmp_path / "whole")
    weights = load_weights(tmp_path / "whole", read_run(tmp_path / "whole"), "block_0", "ema")
    still = {"init_from": str(tmp_path / "whole"), "init_layers": how, "learning_rate": 1e-30, "steps": 1}
    fit(make_config(train=still), digits, tmp_path / "blocks")
    for block, start in enumerate(starting_weights(weights, how, [1, 1, 1])):
        begun = load_weights(tmp_path / "blocks", read_run(tmp_path / "blocks"), f"block_{block}", "raw")
        assert all(torch.equal(value, start[name]) for name, value in begun.items())


def test_a_warm_start_that_does_not_fit_is_named(digits: ImageData, tmp_path: Path) -> None:
    fit(make_config(), digits, tmp_path / "blocks")
    with pytest.raises(SettingError, match="holds blocks"):
        fit(make_config(train={"init_from": str(tmp_path / "blocks")}), digits, tmp_path / "a")
    with pytest.raises(SettingError, match="holds no checkpoint"):
        fit(make_config(train={"init_from": str(tmp_path / "nothing")}), digits, tmp_path / "b")
    fit(make_config(method={"name": "end_to_end"}), digits, tmp_path / "whole")
    with pytest.raises(SettingError, match="does not fit this model"):
        fit(make_config(train={"init_from": str(tmp_path / "whole")}, model={"width": 32}), digits, tmp_path / "c")
    with pytest.raises(SettingError, match="train.init_layers=every has no meaning"):
        make_config(train={"init_layers": "every"})


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines, offline


def sd3_pipeline(transformer: nn.Module) -> StableDiffusion3Pipeline:
    """A pipeline that takes embeddings for prompts."""
    none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"))
    pipe = StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=autoencoder(), **none
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_flow_matching_pipeline_draws_through_the_blocks() -> None:
    model = build("SD3Transformer2DModel")
    blocks = convert(model, 2)
    for block in range(2):
        with blocks.training(block):
            pass
    pipe = blocks.attach(sd3_pipeline(build("SD3Transformer2DModel")))
    ran = watch(blocks)
    prompts = {name: torch.randn(1, 8, 24) for name in ("prompt_embeds", "negative_prompt_embeds")}
    prompts |= {f"{kind}pooled_prompt_embeds": torch.randn(1, 12) for kind in ("", "negative_")}
    image = pipe(**prompts, height=16, width=16, num_inference_steps=5, output_type="np").images[0]
    assert image.shape == (16, 16, 3)
    owners = blocks.owners(pipe.scheduler.timesteps)
    assert sorted(set(owners)) == [0, 1]
    assert ran == [layer for owner in owners for layer in blocks.layers[owner]]


def test_a_ddpm_pipeline_draws_through_the_blocks() -> None:
    model = build("DiTTransformer2DModel", num_embeds_ada_norm=1000)
    scheduler = DDIMScheduler()
    blocks = convert(model, 2, scheduler=scheduler)
    pipe = DiTPipeline(transformer=model, vae=autoencoder(), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    blocks.attach(pipe, force=True)
    ran = watch(blocks)
    image = pipe([1], num_inference_steps=4, output_type="np").images[0]
    assert image.shape == (16, 16, 3)
    assert ran == [layer for owner in blocks.owners(scheduler.timesteps) for layer in blocks.layers[owner]]
    assert set(ran) == {0, 1, 2, 3}


def test_weights_of_the_other_kind_are_refused_unless_forced() -> None:
    model = build("SD3Transformer2DModel")
    blocks = convert(model, 2)
    with blocks.training(0):
        pass
    pipe = sd3_pipeline(model)
    with pytest.raises(SettingError, match=r"blocks \[1\] were not trained as blocks"):
        blocks.attach(pipe)
    with pytest.raises(SettingError, match="the whole depth never ran"):
        blocks.undo()
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(SettingError, match="scheduler is ddpm"):
        blocks.attach(pipe, force=True)
    assert type(blocks.undo(force=True)) is diffusers.SD3Transformer2DModel


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 0.6}, r"overlap=0.6"),
        ({"overlap": -0.1}, r"overlap=-0.1"),
        ({"layer_per_block": 2}, "layer_per_block is no option"),
        ({"layers_per_block": 0}, "layers_per_block=0"),
        ({"layers_per_block": 2.9}, "layers_per_block: Value '2.9'"),
        ({"layers_per_block": True}, "layers_per_block: Value 'True'"),
        ({"overlap": None}, "overlap: Incompatible value 'None'"),
        ({"overlap": float("nan")}, "overlap=nan"),
        ({"boundaries": 0.5, "partition": "custom"}, "boundaries: "),
        ({"boundaries": [0, float("nan"), 1], "partition": "custom"}, "must rise"),
        ({"boundaries": [0, 500, 1000], "partition": "custom"}, "boundaries: .* levels from 1.0 to 0.0"),
        ({"block_paths": "transformer_blocks"}, "block_paths: "),
        ({"block_paths": ["transformer_blocks"] * 2}, "named twice"),
        ({"always_run": 2}, "always_run: "),
        ({"always_run": [True]}, r"always_run\[0\]: Value 'True'"),
        ({"always_run": [0, -4]}, r"always_run=\[0, -4\]"),
        ({"always_run": [0, 1, 2, 3]}, "more than the 0 layers"),
        ({"levels": "uniform"}, "levels: "),
        ({"levels": {"names": "uniform"}}, "levels.names"),
        ({"levels": LevelsConfig("logit_normal", mean=float("nan"))}, "levels.mean=nan is not finite"),
        ({"levels": LevelsConfig("logit_normal", std=math.inf)}, "levels.std=inf is not finite"),
        ({"levels": LevelsConfig("list", values=["a"])}, r"values\[0\]: Value 'a'"),
        ({"scheduler": "ddpm"}, "scheduler: str is neither"),
        ({"layers_per_block": 5}, "layers_per_block=5"),
        ({"layers_per_block": None}, "layers_per_block must be given"),
        ({"boundaries": [0, 0.5, 0.5, 1], "partition": "custom"}, r"boundaries=\[0.0, 0.5, 0.5, 1.0\] must rise"),
        ({"boundaries": [0, 0.5, 0.9], "partition": "custom"}, "boundaries: "),
        ({"boundaries": [0, 0.5, 1]}, "belong to partition=custom"),
        ({"partition": "log_uniform"}, "partition=log_uniform"),
        ({"block_paths": ["pos_embed"]}, "pos_embed is a PatchEmbed, not a ModuleList"),
        ({"block_paths": ["nothing"]}, "has no nothing"),
        ({"block_paths": []}, "block_paths"),
        ({"always_run": [4]}, r"always_run=\[4\]"),
        ({"layer_costs": [1.0]}, "layer_costs has 1 numbers"),
        ({"layer_costs": [1.0, 1.0, 1.0, float("nan")]}, r"layer_costs=\[1.0, 1.0, 1.0, nan\]"),
        ({"layer_costs": [1.0, 1.0, 1.0, 0.0]}, r"layer_costs="),
        ({"clock": "hours"}, "clock=hours"),
        ({"mixed": "vote"}, "mixed=vote"),
        ({"overlap_in": "log_snr"}, "needs the scheduler"),
        ({"levels": LevelsConfig("uniform", mean=1.0)}, "levels.mean=1.0 is not read"),
        ({"levels": LevelsConfig("list", values=[100, 100])}, "partition: num_blocks=2 is more than the 1 different levels"),
        ({"levels": LevelsConfig("list", values=[2000])}, "levels.values"),
        ({"levels": LevelsConfig("beta", alpha=0.0)}, "levels.alpha"),
        ({"levels": LevelsConfig("cubic")}, "levels.name=cubic"),
        ({"levels": LevelsConfig("uniform"), "scheduler": DDPMScheduler()}, "continuous"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    model = build("SD3Transformer2DModel")
    with pytest.raises(SettingError, match=message):
        convert(model, **{"layers_per_block": 2, **options})
    assert type(model.transformer_blocks) is nn.ModuleList
    assert "diffusion_blocks" not in model.config


@pytest.mark.parametrize("other", [None, "a/name", nn.Linear(2, 2), nn.ModuleList(), FluxTransformer2DModel])
def test_what_is_no_transformer_is_refused(other: Any) -> None:
    with pytest.raises(SettingError, match="convert takes a diffusers transformer|is not a diffusers model"):
        convert(other, 2)


def test_a_second_conversion_is_refused() -> None:
    model = flux()
    convert(model, 3)
    with pytest.raises(SettingError, match="converted already"):
        convert(model, 3)


def test_a_model_without_a_timestep_is_refused() -> None:
    class Timeless(FluxTransformer2DModel):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    with pytest.raises(SettingError, match="Timeless.forward has no timestep"):
        convert(Timeless(**families.MODELS["FluxTransformer2DModel"]), 2)


def test_capturing_a_layers_features_is_refused() -> None:
    model = flux()
    model.transformer_blocks[1].register_forward_hook(lambda module, args, result: None)
    with pytest.raises(SettingError, match=r"transformer_blocks\.1 has a forward hook"):
        convert(model, 3)


def test_several_levels_in_one_sample_and_two_times_are_refused() -> None:
    model = build("WanTransformer3DModel")
    convert(model, 2)
    arguments = inputs("WanTransformer3DModel")
    with pytest.raises(SettingError, match="levels inside one sample"):
        output(model, clone(arguments, timestep=torch.tensor([[900.0] * 16 + [10.0] * 16] * 2)))
    model = build("HunyuanImageTransformer2DModel")
    convert(model, 2)
    with pytest.raises(SettingError, match="timestep_r"):
        output(model, clone(inputs("HunyuanImageTransformer2DModel"), timestep_r=torch.tensor([100.0, 100.0])))
    with model._diffusion_blocks.training(0), pytest.raises(SettingError, match="timestep_r"):
        output(model, clone(inputs("HunyuanImageTransformer2DModel"), timestep_r=torch.tensor([100.0, 100.0])))


@pytest.mark.parametrize(
    ("name", "argument"),
    [("FluxTransformer2DModel", "controlnet_block_samples"), ("SD3Transformer2DModel", "block_controlnet_hidden_states")],
)
def test_what_a_controlnet_adds_to_fixed_layers_is_refused(name: str, argument: str) -> None:
    model = build(name)
    convert(model, 2)
    with pytest.raises(SettingError, match=f"{argument}: a ControlNet"):
        output(model, clone(inputs(name), **{argument: [torch.zeros(2, 16, 32)]}))


def test_layers_to_skip_are_no_samples() -> None:
    """As many layers to skip as samples, in a batch that mixes blocks."""
    model = build("SD3Transformer2DModel")
    convert(model, 2)
    ran = watch(model._diffusion_blocks)
    mixed = clone(inputs("SD3Transformer2DModel"), timestep=torch.tensor([700.0, 200.0]), skip_layers=[0, 3])
    with torch.no_grad():
        output(model, mixed)
    assert ran == [1, 2]


def test_mixed_batches_are_refused_by_option() -> None:
    model = flux()
    convert(model, 3, mixed="refuse")
    with pytest.raises(SettingError, match=r"mixes blocks \[0, 1\]"):
        output(model, clone(inputs("FluxTransformer2DModel"), timestep=torch.tensor([0.9, 0.1])))


@pytest.mark.parametrize("blocks_to_train", [[], [0, 0], [2], [-1], [True], [0.0], [[0]], ["0"]])
def test_blocks_to_train_are_checked(blocks_to_train: list[int]) -> None:
    with pytest.raises(SettingError, match="blocks_to_train"):
        convert(flux(), 3).freeze(blocks_to_train)


def test_adapters_that_miss_a_block_are_named() -> None:
    model = flux()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["add_q_proj"]))  # layers of two streams alone
    with pytest.raises(SettingError, match="block_1 has nothing to train"):
        convert(model, 3).freeze([1])


def test_offloading_before_conversion_is_refused() -> None:
    model = flux()
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(SettingError, match="convert it before"):
        convert(model, 3)


def test_every_setting_of_a_distribution_moves_it() -> None:
    clock = read_clock()
    grid = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    ways = [("logit_normal", "mean", 0.5), ("logit_normal", "std", 2.0), ("mode", "scale", 0.5), ("beta", "alpha", 2.0)]
    ways += [("beta", "beta", 3.0), ("uniform", "shift", 2.0)]
    for name, key, value in ways:
        plain, changed = (level_distribution(LevelsConfig(name, **more), clock).cdf(grid) for more in ({}, {key: value}))
        assert not torch.allclose(plain, changed), key
