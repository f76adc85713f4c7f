"""Transformer layers and the backbones that are built from them.

A backbone F(x, c_noise, condition) is layers only: it knows no noise level's meaning and no block. A block of a model is a whole
backbone of fewer layers, with its own embeddings and head.

DiT: Peebles and Xie, arXiv 2212.09748. ViT: Dosovitskiy et al., arXiv 2010.11929.
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


class AdaLN(nn.Sequential):
    """What a condition says to a layer: SiLU, then linear (DiT), or the other way round (the released ViT of DiffusionBlocks)."""

    def __init__(self, condition_width: int, out_features: int, order: str = "dit") -> None:
        activation, linear = nn.SiLU(), nn.Linear(condition_width, out_features)
        super().__init__(*((activation, linear) if order == "dit" else (linear, activation)))

    @property
    def linear(self) -> nn.Linear:
        return next(module for module in self if isinstance(module, nn.Linear))


class DiTLayer(nn.Module):
    """A transformer layer with adaLN-Zero: shift, scale and gate for attention and MLP come from the condition.

    Args:
        condition_width: of the condition c; None: the layer's own.
        order: of the condition's linear map and activation, see AdaLN.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float = 4.0,
        *,
        condition_width: int | None = None,
        order: str = "dit",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=lambda: nn.GELU(approximate="tanh"), drop=dropout)
        self.adaLN = AdaLN(condition_width or width, 6 * width, order)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN(c).chunk(6, dim=-1)  # 6 x (N, 1, D)
        x = x + gate_a * self.dropout(self.attention(modulate(self.norm1(x), shift_a, scale_a)))  # (N, T, D)
        return x + gate_m * self.mlp(modulate(self.norm2(x), shift_m, scale_m))  # (N, T, D)


class ViTLayer(nn.Module):
    """A transformer layer without a condition, its norms in front (ViT)."""

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=lambda: nn.GELU(approximate="tanh"), drop=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))  # (N, T, D)
        return x + self.mlp(self.norm2(x))  # (N, T, D)


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
    """Adaptive layer norm and a linear head, zero at the start. Arguments as for DiTLayer."""

    def __init__(self, width: int, out_features: int, *, condition_width: int | None = None, order: str = "dit") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.adaLN = AdaLN(condition_width or width, 2 * width, order)
        self.linear = nn.Linear(width, out_features)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN(c).chunk(2, dim=-1)  # 2 x (N, 1, D)
        return self.linear(modulate(self.norm(x), shift, scale))  # (N, T, out)


def initialize(model: nn.Module) -> None:
    """Initialises linear maps, patches, level embeddings and what a condition moves as DiT does.

    A layer with adaLN-Zero is the identity, and a FinalLayer gives zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            nn.init.xavier_uniform_(module.proj.weight.flatten(1))
            nn.init.zeros_(module.proj.bias)
        elif isinstance(module, LevelEmbedding):
            for linear in (module.mlp[0], module.mlp[2]):
                nn.init.normal_(linear.weight, std=0.02)
        elif isinstance(module, AdaLN | FinalLayer):
            nn.init.zeros_(module.linear.weight)


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
        initialize(self)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=0.02)

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


class Tokens(nn.Module):
    """Patches at learned positions, with one learned token or a given one before them.

    Args:
        own_token: whether the first token is learned (ViT's class token); without it, the caller gives one.
    """

    def __init__(self, *, channels: int, size: int, patch_size: int, width: int, own_token: bool = True) -> None:
        super().__init__()
        self.patches = PatchEmbed(size, patch_size, channels, width)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch_size) ** 2, width))
        self.token = nn.Parameter(0.02 * torch.randn(width)) if own_token else None

    def forward(self, images: Tensor, token: Tensor | None = None) -> Tensor:
        first = token if self.token is None else self.token.expand(len(images), -1)  # (N, D)
        return torch.cat([first[:, None], self.patches(images) + self.positions], dim=1)  # (N, 1 + T, D)


class ViT(nn.Module):
    """Some layers of a plain ViT: it may begin with the patches, and may end with a linear head on its first token.

    A whole ViT has all layers and both ends. A group of layers that learns by itself takes the tokens of the group before it.

    Args:
        tokens: what the first group begins with; None for a later one.
        num_classes: of the head; 0 for a group without one.
    """

    def __init__(
        self, *, tokens: Tokens | None, depth: int, width: int, heads: int, mlp_ratio: float, dropout: float, num_classes: int
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.layers = nn.ModuleList(ViTLayer(width, heads, mlp_ratio, dropout) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width, eps=1e-6), nn.Linear(width, num_classes)) if num_classes else None
        initialize(self)
        if self.head is not None:
            nn.init.zeros_(self.head[1].weight)

    def forward(self, x: Tensor, token: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens after the last layer, (N, 1 + T, D), and the logits, (N, classes), of a group with a head.

        Args:
            x: images (N, C, H, W) for the first group, tokens (N, 1 + T, D) for a later one.
            token: the first token, (N, D), where the group begins with one that is given.
        """
        if self.tokens is not None:
            x = self.tokens(x, token)  # (N, 1 + T, D)
        for layer in self.layers:
            x = layer(x)  # (N, 1 + T, D)
        return x, None if self.head is None else self.head(x[:, 0])  # (N, 1 + T, D), (N, classes)


class LabelEnds(nn.Module):
    """What is around the layers of a ViT that denoises the embedding of its label: tokens and level in, logits out.

    Args:
        label_token: `beside` the class token, which is read out (DiffusionBlocks, appendix B), or `instead` of it (released).
        order: of the conditions' linear map and activation, see AdaLN; `released` comes with a condition of a sixth of the width.
    """

    def __init__(
        self, *, channels: int, size: int, patch_size: int, width: int, num_classes: int, label_token: str, order: str
    ) -> None:
        super().__init__()
        beside = label_token == "beside"
        condition_width = width if order == "dit" else width // 6
        self.tokens = Tokens(channels=channels, size=size, patch_size=patch_size, width=width, own_token=beside)
        self.label = nn.Linear(width, width) if beside else None
        self.level = LevelEmbedding(condition_width)
        self.head = FinalLayer(width, num_classes, condition_width=condition_width, order=order)
        initialize(self)

    def start(self, z_in: Tensor, images: Tensor) -> Tensor:
        """Returns the layers' input: class token, patches and noisy label, or noisy label and patches."""
        if self.label is None:
            return self.tokens(images, z_in)  # (N, 1 + T, D)
        return torch.cat([self.tokens(images), self.label(z_in)[:, None]], dim=1)  # (N, 2 + T, D)


class LabelViT(nn.Module):
    """ViT that denoises the embedding of its label, given the image: F(z_in, c_noise, images) -> logits.

    Its ends may be shared with other blocks: then they belong to another part, and the layers alone are this block's.
    """

    def __init__(self, ends: LabelEnds, layers: nn.ModuleList) -> None:
        super().__init__()
        self.ends, self.layers = ends, layers

    def forward(self, z_in: Tensor, c_noise: Tensor, images: Tensor, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Returns logits (N, classes).

        Args:
            z_in: noisy embeddings (N, D), scaled.
            c_noise: (N,).
            images: (N, C, H, W).
            skip: where the label stands in the class token's place, c_skip z (N, D) and c_out (N, 1): the released code
                denoises the token by EDM's formula before it reads it out.
        """
        x = self.ends.start(z_in, images)  # (N, T, D)
        c = self.ends.level(c_noise)[:, None]  # (N, 1, C)
        for layer in self.layers:
            x = layer(x, c)  # (N, T, D)
        token = x[:, :1]  # (N, 1, D)
        if self.ends.label is None:
            c_skip_z, c_out = skip
            token = c_skip_z[:, None] + c_out[:, None] * token  # (N, 1, D)
        return self.ends.head(token, c)[:, 0]  # (N, classes)
