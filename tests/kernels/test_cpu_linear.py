"""CPU linear layers: right, and independent of how many rows are computed together."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import linear

# (out, in) of every linear layer of SmolLM2-135M, the head cut to what a test can afford.
SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (8192, 576)}
NUM_ROWS = 256  # x the smallest out (576) = 147,456 elements compared for each row count


def _weight(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * 0.05).to(dtype), torch.randn(NUM_ROWS, shape[1]).to(dtype)


def _in_slices(x: Tensor, layer: linear.PackedLinear, num_rows: int) -> Tensor:
    """The product computed num_rows at a time, each slice padded as a step would be."""
    out = []
    for part in x.split(num_rows):
        padded = x.new_zeros(linear.padded_rows(part.shape[0], x.dtype), x.shape[1])
        padded[: part.shape[0]] = part
        out.append(linear.linear(padded, layer)[: part.shape[0]])
    return torch.cat(out)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 8, 16, 31, 32, 64, 100, 128, 200])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_each_row_has_the_same_bits_however_many_rows_are_computed(
    name: str, dtype: torch.dtype, num_rows: int
) -> None:
    weight, x = _weight(SHAPES[name], dtype)
    layer = linear.pack_linear(weight)

    whole = linear.linear(x, layer)

    assert whole.numel() >= 100_000
    assert torch.equal(whole, _in_slices(x, layer, num_rows))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", [2, 8, 37, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)], ids=["bf16", "fp32"])
def test_linear_matches_its_oracle(dtype: torch.dtype, tolerance: float, num_rows: int, bias: bool) -> None:
    weight, x = _weight((96, 160), dtype)
    x = x[:num_rows]
    b = torch.randn(96).to(dtype) if bias else None

    result = linear.linear(x, linear.pack_linear(weight, b))

    torch.testing.assert_close(result, reference.linear(x, weight, b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_add_linear_accumulates_in_float32(dtype: torch.dtype) -> None:
    weight, x = _weight((96, 160), dtype)
    residual = torch.randn(NUM_ROWS, 96) * 1000
    expected = residual + linear.linear(x, linear.pack_linear(weight)).float()

    linear.add_linear_(residual, x, linear.pack_linear(weight))

    assert torch.equal(expected, residual)


def test_a_step_never_has_fewer_rows_than_its_dtype_needs() -> None:
    assert [linear.padded_rows(n, torch.bfloat16) for n in (0, 1, 2, 3, 17)] == [2, 2, 2, 3, 17]
    assert [linear.padded_rows(n, torch.float32) for n in (1, 8, 9, 17)] == [8, 8, 16, 24]
