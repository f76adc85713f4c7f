"""Transformer layers and the backbones that are built from them.

A backbone F(x, c_noise, condition) is layers only: it knows no noise level's meaning and no block. A block of a model is a whole
backbone of fewer layers, with its own embeddings and head.

DiT: Peebles and Xie, arXiv 2212.09748. ViT: Dosovitskiy et al., arXiv 2010.11929.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed, SwiGLU
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

# In bf16 on a CPU (AVX512-BF16, one thread) plain products beat PyTorch's flash kernel at every length: in training 8 times at 16
# tokens, 3 at 256, 1.3 at 1,024; in inference 1.7, 2.3 and 1.1. Up to 32 tokens its math kernel trains as fast and, since it
# computes in float32, more exactly. In float32 flash is the fastest or within 15% of it.
CPU_MATH_TOKENS = 32
CPU_PRODUCT_TOKENS = 1024  # beyond, the (T, T) matrix that training keeps outweighs the time
CPU_MASKED_MATH_TOKENS = 128  # with a mask: the math kernel trains fastest up to here
FLEX_TOKENS = 128  # FlexAttention skips what is masked in tiles of this size: below it there is nothing to skip


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
    """Scaled dot-product attention by the fastest kernel for length, precision, direction and device; the only choice of it.

    Args:
        q, k, v: (N, heads, T, head_dim); q may have fewer tokens.
        mask: True where a query sees a key, (N or 1, 1, T_q, T_k), or FlexAttention's form of it; None: every key is seen.

    Returns:
        (N, heads, T_q, head_dim).
    """
    if isinstance(mask, BlockMask):
        return compiled_flex_attention()(q, k, v, block_mask=mask)
    tokens = q.shape[-2]
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or tokens > CPU_PRODUCT_TOKENS:
        return F.scaled_dot_product_attention(q, k, v, mask)
    training = torch.is_grad_enabled() and q.requires_grad
    plain = mask is None and q.shape == k.shape  # a cache's queries take the kernel of the whole sequence that they repeat
    if training and tokens <= (CPU_MATH_TOKENS if plain else CPU_MASKED_MATH_TOKENS):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, mask)
    return product_attention(q, k, v) if plain else F.scaled_dot_product_attention(q, k, v, mask)


def product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as two matrix products in the precision of its inputs. Arguments and result as for `attention`."""
    q, k, v, heads = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[:2]
    unused = q.new_zeros(())  # baddbmm scales the products while it makes them
    scores = torch.baddbmm(unused, q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)  # (N * heads, T, T)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, heads)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Returns FlexAttention as a kernel; uncompiled it is slower than a dense mask."""
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Visibility:
    """Which tokens see which, said once for every kernel. Every token sees itself, so no row of a mask is empty.

    Attributes:
        rule: `all`; `causal` (itself and what is before it); `concat`: the noisy tokens 0..T-1 and after them the clean tokens
            0..T-1 of one text, where noisy i sees itself and clean j < i, clean i sees clean j <= i, and nothing sees another
            noisy token (block diffusion with blocks of one token, Arriola et al., arXiv 2503.09573).
        length: T, the tokens of the text.
        documents: (N, T) int64: tokens see their own document alone; None: a row is one document.
    """

    rule: str
    length: int
    documents: Tensor | None = None

    @property
    def size(self) -> int:
        """Tokens that are in the sequence: twice the text's for `concat`."""
        return self.length * (2 if self.rule == "concat" else 1)

    def allowed(self, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Returns whether a query sees a key, for indices that broadcast; FlexAttention calls this a mask_mod."""
        i, j = query % self.length, key % self.length
        if self.rule == "all":
            seen = (i >= 0) & (j >= 0)
        elif self.rule == "causal":
            seen = i >= j
        else:
            noisy_query, noisy_key = query < self.length, key < self.length
            seen = (noisy_query & noisy_key & (i == j)) | (~noisy_key & torch.where(noisy_query, i > j, i >= j))
        return seen if self.documents is None else seen & (self.documents[row, i] == self.documents[row, j])

    def dense(self, device: torch.device | str) -> Tensor:
        """Returns the mask, (N or 1, 1, size, size) bool."""
        rows = torch.arange(1 if self.documents is None else len(self.documents), device=device)
        index = torch.arange(self.size, device=device)
        seen = self.allowed(rows[:, None, None, None], rows[:1], index[:, None], index)
        return seen.expand(len(rows), 1, self.size, self.size)

    def blocks(self, device: torch.device | str) -> BlockMask:
        """Returns the mask in FlexAttention's form."""

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # it takes functions, not methods
            return self.allowed(row, head, query, key)

        rows = None if self.documents is None else len(self.documents)
        return create_block_mask(allowed, rows, None, self.size, self.size, device=device)

    def mask(self, device: torch.device) -> Tensor | BlockMask | None:
        """Returns the mask in the form that is fast on a device, or None where every key is seen."""
        if self.rule == "all" and self.documents is None:
            return None
        return self.blocks(device) if device.type == "cuda" and self.size >= FLEX_TOKENS else self.dense(device)


@dataclass
class Cache:
    """Keys and values of tokens that are decided, for every attention of one network in the order in which they run."""

    entries: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (N, heads, T, head_dim) each

    def join(self, call: int, k: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the attention number `call`, those of earlier tokens first; keeps them if asked to."""
        if call < len(self.entries):
            past_k, past_v = self.entries[call]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        if keep:
            self.entries[call : call + 1] = [(k, v)]
        return k, v


class TokenAttention:
    """One pass of a network over tokens: rotary positions, what sees what, and what earlier passes left in a cache.

    Rotary positions: Su et al., arXiv 2104.09864.

    Args:
        positions: (T,) of the tokens of this pass.
        mask: see `attention`; over the keys of this pass alone, so that there is none where a cache holds earlier ones.
        keep: whether this pass's keys and values are added to the cache.
    """

    def __init__(
        self,
        positions: Tensor,
        head_dim: int,
        mask: Tensor | BlockMask | None = None,
        cache: Cache | None = None,
        keep: bool = False,
    ) -> None:
        frequencies = 1 / 10_000 ** (torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
        angles = torch.outer(positions.float(), frequencies)  # (T, head_dim/2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.mask, self.cache, self.keep, self.calls = mask, cache, keep, 0

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)  # 2 x (N, heads, T, head_dim/2)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1).to(x.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.rotate(q), self.rotate(k)
        if self.cache is not None:
            k, v = self.cache.join(self.calls, k, v, self.keep)
        self.calls += 1
        return attention(q, k, v, self.mask)  # (N, heads, T, head_dim)


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
    return torch.addcmul(shift, x, 1 + scale)


def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """A residual sum whose branch is gated: x + gate out."""
    # Where autocast leaves a branch in bfloat16, one pass over both would need, and on a GPU keep, the branch in float32.
    return torch.addcmul(x, gate, out) if out.dtype == x.dtype else x + gate * out


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.proj = nn.Linear(width, width, bias)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attention) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x (N, heads, T, head_dim)
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))  # (N, T, D)


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
        x = add_gated(x, gate_a, self.dropout(self.attention(modulate(self.norm1(x), shift_a, scale_a))))  # (N, T, D)
        return add_gated(x, gate_m, self.mlp(modulate(self.norm2(x), shift_m, scale_m)))  # (N, T, D)


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


class TokenLayer(nn.Module):
    """A transformer layer for text: RMSNorm, rotary attention, SwiGLU, as in Llama.

    With a condition, the norms' scales come from it, and a shift and a gate beside them, as in a DiT.

    Args:
        condition_width: 0 for a layer without a condition. Smaller than `width`, as in MDLM, since a condition per token costs
            6 * width * condition_width products for each.
        sandwich: norms after the residual sums too, which keep a recurrent state in bounds (Huginn, arXiv 2502.05171).
    """

    def __init__(self, width: int, heads: int, condition_width: int = 0, sandwich: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=condition_width == 0)
        self.attention = Attention(width, heads, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=condition_width == 0)
        self.mlp = SwiGLU(width, swiglu_width(width), bias=False)
        self.adaLN = AdaLN(condition_width, 6 * width) if condition_width else None
        self.after1 = nn.RMSNorm(width, eps=1e-6) if sandwich else nn.Identity()
        self.after2 = nn.RMSNorm(width, eps=1e-6) if sandwich else nn.Identity()

    def forward(self, x: Tensor, c: Tensor | None, attend: TokenAttention) -> Tensor:
        if self.adaLN is None:
            x = self.after1(x + self.attention(self.norm1(x), attend))  # (N, T, D)
            return self.after2(x + self.mlp(self.norm2(x)))  # (N, T, D)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN(c).chunk(6, dim=-1)  # 6 x (N, T or 1, D)
        x = self.after1(add_gated(x, gate_a, self.attention(modulate(self.norm1(x), shift_a, scale_a), attend)))  # (N, T, D)
        return self.after2(add_gated(x, gate_m, self.mlp(modulate(self.norm2(x), shift_m, scale_m))))  # (N, T, D)


class Layers(nn.ModuleList):
    """Layers one after the other, all with the same condition."""

    checkpointing = False  # whether a layer's input alone is kept for the backward pass, and the rest computed again

    def forward(self, x: Tensor, *condition: Any) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, *condition, use_reentrant=False) if self.checkpointing else layer(x, *condition)  # (N, T, D)
        return x


def set_checkpointing(model: nn.Module, checkpointing: bool) -> bool:
    """Switches activation checkpointing for all layers of a model; returns whether it has layers."""
    found = [module for module in model.modules() if isinstance(module, Layers)]
    for layers in found:
        layers.checkpointing = checkpointing
    return bool(found)


def swiglu_width(width: int) -> int:
    """Returns Llama's hidden width, 8/3 of the width so that three matrices cost what two of 4 would, up to a multiple of 32."""
    return -(-8 * width // 96) * 32


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


def full_precision(x: Tensor) -> torch.autocast:
    """The context of small products on x's device, of which casts to bfloat16 would cost more than they save."""
    return torch.autocast(x.device.type, enabled=False)


def embed_patches(patches: PatchEmbed, images: Tensor) -> Tensor:
    """Returns timm's PatchEmbed of images (N, C, H, W), (N, T, D), as a matrix product.

    A convolution of so few channels takes twice as long, and leaves D outermost, which slows every layer.
    """
    rows, columns = patches.grid_size
    x = images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))  # (N, C, rows, p, columns, p)
    x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (N, T, C * p * p)
    return F.linear(x, patches.proj.weight.flatten(1), patches.proj.bias)  # (N, T, D)


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


class PatchHead(FinalLayer):
    """The same with shift and scale folded into the linear map, of fewer values than tokens: the moved tokens are never held."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN(c).chunk(2, dim=-1)  # 2 x (N, 1, D)
        weight = self.linear.weight * (1 + scale)  # (N, out, D)
        return torch.baddbmm(self.linear(shift), self.norm(x), weight.mT)  # (N, T, out)


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

    def __init__(
        self, *, channels: int, size: int, patch_size: int, depth: int, width: int, heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patches = PatchEmbed(size, patch_size, channels, width)
        self.register_buffer("positions", sincos_positions(width, size // patch_size), persistent=False)
        self.level = LevelEmbedding(width)
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.layers = Layers(DiTLayer(width, heads) for _ in range(depth))
        self.head = PatchHead(width, patch_size**2 * channels)
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
        with full_precision(x):
            x = embed_patches(self.patches, x) + self.positions  # (N, T, D)
            c = self.level(c_noise)  # (N, D)
            if self.label is not None:
                c = c + self.label(condition)  # (N, D)
        c = c[:, None]  # (N, 1, D)
        x = self.layers(x, c)  # (N, T, D)
        with full_precision(x):
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
        return torch.cat([first[:, None], embed_patches(self.patches, images) + self.positions], dim=1)  # (N, 1 + T, D)


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
        self.layers = Layers(ViTLayer(width, heads, mlp_ratio, dropout) for _ in range(depth))
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
        x = self.layers(x)  # (N, 1 + T, D)
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

    def __init__(self, ends: LabelEnds, layers: Layers) -> None:
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
        x = self.layers(x, c)  # (N, T, D)
        token = x[:, :1]  # (N, 1, D)
        if self.ends.label is None:
            c_skip_z, c_out = skip
            token = c_skip_z[:, None] + c_out[:, None] * token  # (N, 1, D)
        return self.ends.head(token, c)[:, 0]  # (N, classes)
