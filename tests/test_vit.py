"""The DiT: published sizes, identity at the start, positions, what it is sensitive to."""

import pytest
import torch

from config import SIZES
from vit import CPU_MATH_TOKENS, DiT, FinalLayer, Layers, add_gated, attention, embed_patches, modulate, sincos_positions


def dit(size: str, **values: int) -> DiT:
    depth, width, heads = SIZES[size]
    arguments = {"channels": 4, "size": 32, "patch_size": 2, "depth": depth, "width": width, "heads": heads, "num_classes": 1000}
    return DiT(**{**arguments, **values})


@pytest.mark.parametrize(
    ("size", "millions", "values"),
    [
        ("S", 32.86, {}),
        ("B", 130.3, {}),
        ("L", 457.8, {}),
        ("XL", 674.8, {}),
        ("S", 32.48, {"channels": 3, "num_classes": 10}),
    ],
)
def test_parameter_counts(size, millions, values):
    """DiT's table, for 4 latent channels in and 8 out there: the head's extra outputs are below the digits compared."""
    with torch.device("meta"):
        count = sum(p.numel() for p in dit(size, **values).parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06 if millions > 100 else 0.006)


def random_dit(**values: int) -> DiT:
    torch.manual_seed(0)
    model = DiT(**{"channels": 3, "size": 8, "patch_size": 2, "depth": 2, "width": 16, "heads": 2, "num_classes": 5, **values})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_starts_at_zero_with_identity_layers():
    model = DiT(channels=1, size=8, patch_size=2, depth=3, width=16, heads=2, num_classes=10)
    x, c_noise, labels = torch.randn(4, 1, 8, 8), torch.randn(4), torch.arange(4)
    assert model(x, c_noise, labels).abs().max() == 0
    tokens, c = torch.randn(4, 16, 16), torch.randn(4, 1, 16)
    assert torch.equal(model.layers[1](tokens, c), tokens)


def test_shapes_and_sensitivity():
    model = random_dit()
    x, c_noise, labels = torch.randn(4, 3, 8, 8), torch.randn(4), torch.arange(4)
    y = model(x, c_noise, labels)
    assert y.shape == x.shape
    assert not torch.allclose(y, model(x, c_noise + 0.1, labels))
    assert not torch.allclose(y, model(x, c_noise, torch.full((4,), 5)))  # 5 is the null class
    with pytest.raises(IndexError):
        model(x, c_noise, torch.full((4,), 6))


@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16])
def test_modulation_and_gate_are_their_formulas(branch):
    """The residual stream is float32; under autocast the conditions and the branch may be bfloat16."""
    torch.manual_seed(0)
    x, out, condition = torch.randn(4, 6, 8), torch.randn(4, 6, 8).to(branch), torch.randn(3, 4, 1, 8).to(branch)
    shift, scale, gate = condition
    tolerance = 1e-6 if branch == torch.float32 else 0.02
    moved, sum_ = modulate(x, shift, scale), add_gated(x, gate, out)
    assert moved.dtype == sum_.dtype == torch.float32
    torch.testing.assert_close(moved, x * (1 + scale.float()) + shift.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sum_, x + gate.float() * out.float(), rtol=tolerance, atol=tolerance)


def test_samples_do_not_mix():
    model = random_dit()
    x, c_noise, labels = torch.randn(4, 3, 8, 8), torch.randn(4), torch.arange(4)
    whole = model(x, c_noise, labels)
    single = model(x[2:3], c_noise[2:3], labels[2:3])
    assert torch.allclose(whole[2:3], single, atol=1e-5)


def test_unpatchify_inverts_patches():
    """Patches taken as the embedding takes them, put back, give the image."""
    model = random_dit()
    x = torch.arange(2 * 3 * 8 * 8.0).reshape(2, 3, 8, 8)
    patches = x.reshape(2, 3, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).reshape(2, 16, 12)  # (N, T, p p C)
    assert torch.equal(model.unpatchify(patches), x)


def test_patches_are_embedded_as_by_a_convolution():
    model = random_dit()
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(embed_patches(model.patches, x), model.patches(x))


def test_folded_head_is_the_final_layer():
    model = random_dit()
    x, c = torch.randn(4, 16, 16), torch.randn(4, 1, 16)
    torch.testing.assert_close(model.head(x, c), FinalLayer.forward(model.head, x, c))


def test_embeddings_and_head_stay_in_float32_under_autocast():
    model = random_dit(depth=1)
    model.layers = Layers()
    arguments = torch.randn(4, 3, 8, 8), torch.randn(4), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(*arguments)
    assert y.dtype == torch.float32 and torch.equal(y, model(*arguments))


def test_unconditional():
    model = random_dit(num_classes=0)
    assert model.label is None
    assert model(torch.randn(2, 3, 8, 8), torch.randn(2)).shape == (2, 3, 8, 8)


def test_positions_are_distinct_and_bounded():
    positions = sincos_positions(16, 4)
    assert positions.shape == (16, 16) and positions.abs().max() <= 1
    assert torch.cdist(positions, positions).fill_diagonal_(1).min() > 0.1
    column_half = positions.reshape(4, 4, 16)[:, :, :8]
    assert torch.equal(column_half[0], column_half[3])  # the first half knows the column alone


@pytest.mark.parametrize("tokens", [16, CPU_MATH_TOKENS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_attention_kernels_agree(tokens, dtype, training):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, tokens, 8, dtype=dtype, requires_grad=training) for _ in range(3))
    expected = torch.softmax(q.double() @ k.double().mT / 8**0.5, dim=-1) @ v.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(attention(q, k, v).double(), expected, atol=tolerance)
