"""Transformer layers and the backbones that are built from them.

A backbone F(x, c_noise, condition) is layers only: it knows no noise level's meaning and no block. A block of a model is a whole
backbone of fewer layers, with its own embeddings and head.

DiT: Peebles and Xie, arXiv 2212.09748.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# In bf16 on a CPU (AVX512-BF16, one thread) plain products beat PyTorch's flash kernel at every length: in training 8 times at 16
# tokens, 3 at 256, 1.3 at 1,024; in inference 1.7, 2.3 and 1.1. Up to 32 tokens its math kernel trains as fast and, since it
# computes in float32, more exactly. In float32 flash is the fastest or within 15% of it.
CPU_MATH_TOKENS = 32
CPU_PRODUCT_TOKENS = 1024  # beyond, the (T, T) matrix that training keeps outweighs the time


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scaled dot-product attention by the fastest kernel for length, precision, direction and device; the only choice of it.

    Args:
        q, k, v: (N, heads, T, head_dim).

    Returns:
        (N, heads, T, head_dim).
    """
    tokens = q.shape[-2]
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or tokens > CPU_PRODUCT_TOKENS:
        return F.scaled_dot_product_attention(q, k, v)
    if torch.is_grad_enabled() and q.requires_grad and tokens <= CPU_MATH_TOKENS:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)
    return product_attention(q, k, v)


def product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as two matrix products in the precision of its inputs. Arguments and result as for `attention`."""
    q, k, v, heads = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[:2]
    unused = q.new_zeros(())  # baddbmm scales the products while it makes them
    scores = torch.baddbmm(unused, q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)  # (N * heads, T, T)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, heads)


def sincos_positions(width: int, grid: int) -> Tensor:
    """Returns fixed 2-D sin-cos positions: half of the width per axis, the column index first.

    Args:
        width: a multiple of 4.
        grid: rows and columns of patches.

    Returns:
        (grid * grid, width) float32, row-major.
    """
    frequencies = 1 / 10_000 ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    index = torch.arange(grid, dtype=torch.float64)
    angles = torch.outer(index, frequencies)  # (grid, width/4)
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)  # (grid, width/2)
    columns = axis[None, :, :].expand(grid, grid, -1)
    rows = axis[:, None, :].expand(grid, grid, -1)
    return torch.cat([columns, rows], dim=2).reshape(grid * grid, width).float()


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive layer norm's affine part: x (1 + scale) + shift."""
    return x * (1 + scale) + shift


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x (N, heads, T, head_dim)
        return self.proj(attention(q, k, v).transpose(1, 2).flatten(2))  # (N, T, D)


class DiTLayer(nn.Module):
    """A transformer layer with adaLN-Zero: shift, scale and gate for attention and MLP come from the condition."""

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=lambda: nn.GELU(approximate="tanh"))
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN(c).chunk(6, dim=-1)  # 6 x (N, 1, D)
        x = x + gate_a * self.attention(modulate(self.norm1(x), shift_a, scale_a))  # (N, T, D)
        return x + gate_m * self.mlp(modulate(self.norm2(x), shift_m, scale_m))  # (N, T, D)


class LevelEmbedding(nn.Module):
    """Sinusoidal features of a level followed by an MLP, as DiT embeds its timestep."""

    def __init__(self, width: int, num_features: int = 256, max_period: float = 10_000.0) -> None:
        super().__init__()
        half = num_features // 2
        frequencies = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(num_features, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, c_noise: Tensor) -> Tensor:
        angles = c_noise.float()[..., None] * self.frequencies  # (N, features/2)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))  # (N, D)


class FinalLayer(nn.Module):
    """Adaptive layer norm and a linear head, zero at the start."""

    def __init__(self, width: int, out_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, out_features)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN(c).chunk(2, dim=-1)  # 2 x (N, 1, D)
        return self.linear(modulate(self.norm(x), shift, scale))  # (N, T, out)


class DiT(nn.Module):
    """Diffusion transformer on pixels or latents, with as many layers as a block owns.

    Args:
        channels, size: of the (square) input and output, (N, channels, size, size).
        num_classes: 0 for an unconditional model; label `num_classes` is the null class of guidance.
    """

    checkpointing = False  # whether a layer's input alone is kept for the backward pass, and the rest computed again

    def __init__(
        self, *, channels: int, size: int, patch_size: int, depth: int, width: int, heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patches = PatchEmbed(size, patch_size, channels, width)
        self.register_buffer("positions", sincos_positions(width, size // patch_size), persistent=False)
        self.level = LevelEmbedding(width)
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.layers = nn.ModuleList(DiTLayer(width, heads) for _ in range(depth))
        self.head = FinalLayer(width, patch_size**2 * channels)
        self.initialize()

    def initialize(self) -> None:
        """Initialises as DiT does: every layer is the identity and the output is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patches.proj.weight.flatten(1))
        nn.init.zeros_(self.patches.proj.bias)
        for linear in (self.level.mlp[0], self.level.mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=0.02)
        for linear in (*(layer.adaLN[1] for layer in self.layers), self.head.adaLN[1], self.head.linear):
            nn.init.zeros_(linear.weight)

    def forward(self, x: Tensor, c_noise: Tensor, condition: Tensor | None = None) -> Tensor:
        """Returns F(x; c_noise, condition).

        Args:
            x: (N, C, H, W).
            c_noise: (N,).
            condition: labels, (N,) int64; None for an unconditional model.
        """
        x = self.patches(x).contiguous() + self.positions  # (N, T, D); a convolution leaves D outermost, which slows every layer
        c = self.level(c_noise)  # (N, D)
        if self.label is not None:
            c = c + self.label(condition)  # (N, D)
        c = c[:, None]  # (N, 1, D)
        for layer in self.layers:
            x = checkpoint(layer, x, c, use_reentrant=False) if self.checkpointing else layer(x, c)  # (N, T, D)
        return self.unpatchify(self.head(x, c))  # (N, C, H, W)

    def unpatchify(self, x: Tensor) -> Tensor:
        """(N, T, patch * patch * C) -> (N, C, H, W)."""
        grid, p = math.isqrt(x.shape[1]), self.patch_size
        x = x.unflatten(1, (grid, grid)).unflatten(-1, (p, p, -1))  # (N, rows, columns, p, p, C)
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (N, C, H, W)
