"""A tiny random transformer of every family of diffusers, what it is called with, and the table that says which can be blocks.

`PYTHONPATH=. python tests/families.py` writes docs/families.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Tensor, nn

from config import SettingError
from convert import Blocks, convert

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "families.md"
BATCH = 2
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
FLUX_ROPE = {"axes_dims_rope": (4, 4, 8)}
TWO_STREAMS = {"num_layers": 2, "num_single_layers": 2}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 4,
    "rope_max_seq_len": 32,
}

# Constructor arguments: four layers each.
MODELS: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "sample_size": 8,
        "patch_size": 2,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 4,
    },
    "PixArtTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 4,
        "cross_attention_dim": 32,
        "sample_size": 8,
        "patch_size": 2,
        "caption_channels": 24,
        "norm_num_groups": 4,
        "use_additional_conditions": False,
    },
    "SD3Transformer2DModel": {
        **HEADS,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 12,
        "pos_embed_max_size": 8,
    },
    "FluxTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        **FLUX_ROPE,
        "in_channels": 4,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 12,
    },
    "Flux2Transformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        "in_channels": 4,
        "joint_attention_dim": 24,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "ChromaTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        **FLUX_ROPE,
        "in_channels": 4,
        "joint_attention_dim": 24,
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    },
    "BriaTransformer2DModel": {**HEADS, **TWO_STREAMS, **FLUX_ROPE, "in_channels": 4, "joint_attention_dim": 24},
    "LongCatImageTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        **FLUX_ROPE,
        "in_channels": 4,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 24,
    },
    "OvisImageTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        **FLUX_ROPE,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": 24,
    },
    "AuraFlowTransformer2DModel": {
        **HEADS,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 2,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "out_channels": 4,
        "pos_embed_max_size": 16,
    },
    "Lumina2Transformer2DModel": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "hidden_size": 24,
        "num_layers": 4,
        "num_refiner_layers": 1,
        "num_attention_heads": 3,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "axes_dim_rope": (4, 2, 2),
        "axes_lens": (64, 64, 64),
        "cap_feat_dim": 24,
    },
    "SanaTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 24,
        "sample_size": 8,
        "patch_size": 1,
    },
    "SanaVideoTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 24,
        "sample_size": 8,
        "rope_max_seq_len": 32,
    },
    "HunyuanDiT2DModel": {
        **HEADS,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "hidden_size": 32,
        "num_layers": 4,
        "cross_attention_dim": 24,
        "cross_attention_dim_t5": 32,
        "pooled_projection_dim": 16,
        "text_len": 8,
        "text_len_t5": 8,
        "use_style_cond_and_image_meta_size": False,
    },
    "HunyuanImageTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        "in_channels": 4,
        "out_channels": 4,
        "num_refiner_layers": 1,
        "text_embed_dim": 24,
        "rope_axes_dim": (8, 8),
    },
    "HunyuanVideoTransformer3DModel": {
        **TWO_STREAMS,
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 24,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    },
    "QwenImageTransformer2DModel": {
        **HEADS,
        **FLUX_ROPE,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 4,
        "joint_attention_dim": 24,
    },
    "WanTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": WAN,
    "LTXVideoTransformer3DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": 32,
        "num_layers": 4,
        "caption_channels": 24,
    },
    "CogVideoXTransformer3DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 24,
        "num_layers": 4,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 8,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 8,
    },
    "CogView3PlusTransformer2DModel": {
        **HEADS,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "text_embed_dim": 24,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "pos_embed_max_size": 8,
        "sample_size": 8,
    },
    "CogView4Transformer2DModel": {
        **HEADS,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "text_embed_dim": 24,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "pos_embed_max_size": 8,
        "sample_size": 8,
        "rope_axes_dim": (16, 16),
    },
    "MochiTransformer3DModel": {
        "patch_size": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 4,
        "pooled_projection_dim": 16,
        "in_channels": 4,
        "out_channels": None,
        "text_embed_dim": 24,
        "time_embed_dim": 4,
        "max_sequence_length": 8,
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 4,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 24,
        "axes_dims": [8, 4, 4],
        "axes_lens": [256, 32, 32],
    },
    "PRXTransformer2DModel": {
        "in_channels": 4,
        "patch_size": 2,
        "context_in_dim": 24,
        "hidden_size": 16,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 4,
        "axes_dim": [4, 4],
    },
    "AllegroTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "cross_attention_dim": 24,
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": 2,
        "caption_channels": 24,
    },
    "Kandinsky5Transformer3DModel": {
        "in_visual_dim": 4,
        "in_text_dim": 24,
        "in_text_dim2": 12,
        "time_dim": 16,
        "out_visual_dim": 4,
        "model_dim": 32,
        "ff_dim": 32,
        "num_text_blocks": 1,
        "num_visual_blocks": 4,
        "axes_dims": (4, 6, 6),
    },
    "LatteTransformer3DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "cross_attention_dim": 32,
        "sample_size": 8,
        "patch_size": 2,
        "norm_type": "ada_norm_single",
        "caption_channels": 24,
        "video_length": 2,
    },
    "HiDreamImageTransformer2DModel": {
        **HEADS,
        **TWO_STREAMS,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "caption_channels": [24, 24],
        "text_emb_dim": 12,
        "axes_dims_rope": (8, 8),
        "llama_layers": [0, 1, 2, 3],
    },
    "MotifVideoTransformer3DModel": {
        **HEADS,
        **TWO_STREAMS,
        "in_channels": 4,
        "out_channels": 4,
        "num_decoder_layers": 1,
        "text_embed_dim": 24,
        "rope_axes_dim": (4, 4, 8),
    },
    "WanVACETransformer3DModel": {
        **WAN,
        "vace_layers": [0, 2],
        "vace_in_channels": 4,
    },
    "PriorTransformer": {**HEADS, "num_layers": 4, "embedding_dim": 8, "num_embeddings": 4, "additional_embeddings": 4},
    "StableAudioDiTModel": {
        **HEADS,
        "sample_size": 16,
        "in_channels": 4,
        "num_layers": 4,
        "num_key_value_attention_heads": 2,
        "out_channels": 4,
        "cross_attention_dim": 24,
        "time_proj_dim": 8,
        "global_states_input_dim": 8,
        "cross_attention_input_dim": 24,
    },
    "SD3ControlNetModel": {
        **HEADS,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 12,
        "pos_embed_max_size": 8,
    },
    "UNet2DModel": {"sample_size": 8, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "attention_head_dim": 4},
    "UVit2DModel": {
        "hidden_size": 16,
        "cond_embed_dim": 8,
        "micro_cond_encode_dim": 4,
        "micro_cond_embed_dim": 8,
        "encoder_hidden_size": 24,
        "vocab_size": 16,
        "codebook_size": 16,
        "in_channels": 8,
        "block_out_channels": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "block_num_heads": 2,
        "intermediate_size": 16,
    },
}


def text(width: int, length: int = 8) -> Tensor:
    """(N, length, width) embeddings of a text."""
    return torch.randn(BATCH, length, width)


def inputs(name: str, level: float = 0.7) -> dict[str, Any]:
    """Returns what a family's forward is called with, all samples at one level."""
    timestep = torch.full((BATCH,), level * 1000)
    image, video = torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 4, 2, 8, 8)
    mask = torch.ones(BATCH, 8)
    flux = {"hidden_states": torch.randn(BATCH, 16, 4), "encoder_hidden_states": text(24), "timestep": timestep / 1000}
    flux |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    plain = {"hidden_states": image, "encoder_hidden_states": text(24), "timestep": timestep}
    moving = {**plain, "hidden_states": video}
    sizes = {"original_size": torch.full((BATCH, 2), 64.0), "target_size": torch.full((BATCH, 2), 64.0)}
    sizes |= {"crop_coords": torch.zeros(BATCH, 2)}
    rotary = get_2d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), output_type="pt")
    calls: dict[str, dict[str, Any]] = {
        "DiTTransformer2DModel": {
            "hidden_states": image,
            "timestep": timestep.long(),
            "class_labels": 1 + torch.arange(BATCH) % 2,
        },
        "PixArtTransformer2DModel": {**plain, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        "SD3Transformer2DModel": {**plain, "pooled_projections": torch.randn(BATCH, 12)},
        "FluxTransformer2DModel": {**flux, "pooled_projections": torch.randn(BATCH, 12)},
        "Flux2Transformer2DModel": {
            **flux,
            "img_ids": torch.zeros(16, 4),
            "txt_ids": torch.zeros(8, 4),
            "guidance": torch.ones(BATCH),
        },
        "ChromaTransformer2DModel": {**flux, "attention_mask": torch.ones(BATCH, 24).bool()},
        "BriaTransformer2DModel": {**flux, "timestep": timestep},
        "LongCatImageTransformer2DModel": flux,
        "OvisImageTransformer2DModel": flux,
        "AuraFlowTransformer2DModel": {**plain, "timestep": timestep / 1000},
        "Lumina2Transformer2DModel": {**plain, "timestep": 1 - timestep / 1000, "encoder_attention_mask": mask.bool()},
        "SanaTransformer2DModel": plain,
        "SanaVideoTransformer3DModel": moving,
        "HunyuanDiT2DModel": {
            **plain,
            "text_embedding_mask": mask,
            "encoder_hidden_states_t5": text(32),
            "text_embedding_mask_t5": mask,
            "image_rotary_emb": list(rotary),
        },
        "HunyuanImageTransformer2DModel": {**plain, "encoder_attention_mask": mask},
        "HunyuanVideoTransformer3DModel": {
            **moving,
            "encoder_attention_mask": mask,
            "pooled_projections": torch.randn(BATCH, 8),
            "guidance": torch.full((BATCH,), 6000.0),
        },
        "QwenImageTransformer2DModel": {
            "hidden_states": torch.randn(BATCH, 16, 16),
            "encoder_hidden_states": text(24),
            "encoder_hidden_states_mask": mask.long(),
            "timestep": timestep / 1000,
            "img_shapes": [[(1, 4, 4)]] * BATCH,
        },
        "WanTransformer3DModel": moving,
        "SkyReelsV2Transformer3DModel": moving,
        "LTXVideoTransformer3DModel": {
            **plain,
            "hidden_states": torch.randn(BATCH, 32, 4),
            "encoder_attention_mask": mask.bool(),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
        "CogVideoXTransformer3DModel": {**plain, "hidden_states": torch.randn(BATCH, 2, 4, 8, 8)},
        "CogView3PlusTransformer2DModel": {**plain, **sizes},
        "CogView4Transformer2DModel": {**plain, **sizes},
        "MochiTransformer3DModel": {**moving, "timestep": 1000 - timestep, "encoder_attention_mask": mask.bool()},
        "ZImageTransformer2DModel": {
            "x": list(torch.randn(BATCH, 4, 1, 8, 8)),
            "t": 1 - timestep / 1000,
            "cap_feats": list(text(24)),
        },
        "PRXTransformer2DModel": {**plain, "timestep": timestep / 1000},
        "AllegroTransformer3DModel": {
            **moving,
            "attention_mask": torch.ones(BATCH, 2, 8, 8),
            "encoder_attention_mask": mask[:, None],
            "image_rotary_emb": allegro_positions(),
        },
        "Kandinsky5Transformer3DModel": {
            "hidden_states": torch.randn(BATCH, 2, 8, 8, 4),
            "encoder_hidden_states": text(24),
            "timestep": timestep,
            "pooled_projections": torch.randn(BATCH, 12),
            "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(8),
        },
    }
    return calls[name]


def allegro_positions() -> Any:
    """Returns Allegro's rotary frequencies and grid for 2 frames of 4x4 patches."""
    pair = (torch.ones(4, 4), torch.zeros(4, 4))  # cos, sin
    grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(4), indexing="ij")).reshape(3, 1, -1)
    return ((pair,) * 3, grid)


def autoencoder() -> diffusers.AutoencoderKL:
    """A tiny random autoencoder with four latent channels, half as many pixels a side."""
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        shift_factor=0.0,
    )


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Returns a family's tiny transformer with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    model = getattr(diffusers, name)(**{**MODELS[name], **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some families begin with zeros, and then no layer would show in the output
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def output(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """Returns a forward's samples as one tensor."""
    result = model(**arguments, return_dict=False)
    return torch.stack(list(result if isinstance(result, Tensor) else result[0]))  # Kandinsky 5 returns no tuple


def watch(blocks: Blocks) -> list[int]:
    """Returns a list that receives the index of every layer that runs from now on."""
    ran: list[int] = []
    for index, layer in enumerate(layer for layers in blocks.lists.values() for layer in layers):
        layer.register_forward_hook(lambda module, args, result, index=index: ran.append(index))
    return ran


def check(name: str) -> str:
    """Converts a tiny model of a family and returns what the table says of it: `works`, or why it is refused."""
    model = build(name)
    try:
        blocks = convert(model, 4)
    except SettingError as error:
        return f"refused: {error}"
    blocks.undo()
    arguments = inputs(name)
    with torch.no_grad():
        before = output(model, arguments)
        blocks = convert(model, 4)
        assert torch.equal(before, output(model, arguments)), f"{name}: one block with every layer is not the model"
        blocks.undo()
        blocks = convert(model, 2)
        ran = watch(blocks)
        for level, layers in ((0.7, [0, 1]), (0.2, [2, 3])):
            ran.clear()
            assert output(model, inputs(name, level)).isfinite().all()
            assert ran == layers, f"{name}: layers {ran} ran at level {level}"
    lists = ", ".join(f"`{path}`" for path in blocks.lists)
    return f"works: {lists}; its timestep is `{blocks.config.clock}`"


def table(rows: Callable[[str], str] = check) -> str:
    """Returns docs/families.md."""
    lines = [
        "# Families of transformers",
        "",
        "Written by `PYTHONPATH=. python tests/families.py`, and compared by `tests/test_convert.py`: of each class of",
        f"diffusers {diffusers.__version__} a tiny random model is built and converted. It works if one block with every layer",
        "gives the model's outputs to the bit and, with two blocks, only the layers of the block that owns the level run.",
        "",
        "| class | blocks |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| `{name}` | {rows(name)} |" for name in MODELS)]) + "\n"


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(table())
