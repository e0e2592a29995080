"""CPU norm, rotation and activation against their oracles, and row by row."""

import pytest
import torch

from kernels import reference
from kernels.cpu import elementwise, kv_write

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float32, 1e-6)], ids=["bf16", "fp32"]
)


@pytest.mark.parametrize("size", [64, 576, 1000])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
def test_rms_norm_matches_its_oracle(num_rows: int, size: int) -> None:
    x = torch.randn(num_rows, size) * 30

    torch.testing.assert_close(elementwise.rms_norm(x, 1e-5, torch.float32), reference.rms_norm(x, 1e-5))


@DTYPES
def test_rotate_matches_its_oracle_on_a_slice_of_a_fused_projection(dtype: torch.dtype, tolerance: float) -> None:
    fused = torch.randn(5, 15, 64).to(dtype)
    angles = torch.randn(5, 32) * 100
    expected = fused.clone()
    expected[:, :12] = reference.rotate(fused[:, :12], angles)

    elementwise.rotate_(fused[:, :12], torch.polar(torch.ones(5, 1, 32), angles.unsqueeze(1)))

    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=1e-4)


@DTYPES
def test_silu_mul_matches_its_oracle(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(9, 130).to(dtype)

    result = elementwise.silu_mul(gate_up)

    torch.testing.assert_close(result, reference.silu_mul(gate_up), rtol=2 * tolerance, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 31, 100])
def test_each_row_has_the_same_bits_however_many_rows_are_computed(num_rows: int) -> None:
    x = torch.randn(300, 576)
    gate_up = torch.randn(300, 3072).bfloat16()
    normed, activated = elementwise.rms_norm(x, 1e-5, torch.bfloat16), elementwise.silu_mul(gate_up)

    assert torch.equal(
        normed, torch.cat([elementwise.rms_norm(part, 1e-5, torch.bfloat16) for part in x.split(num_rows)])
    )
    assert torch.equal(activated, torch.cat([elementwise.silu_mul(part) for part in gate_up.split(num_rows)]))


def test_write_kv_stores_what_its_oracle_stores_and_nothing_else() -> None:
    pool = torch.randn(7, 3, 2, 3, 16, 8)
    block_ids, offsets = torch.tensor([4, 4, 0, 6]), torch.tensor([15, 2, 0, 9])
    key_value = torch.randn(4, 6, 8)
    expected = pool.clone()
    reference.write_kv(expected, 1, block_ids, offsets, key_value[:, :3], key_value[:, 3:])

    kv_write.write_kv(pool, 1, kv_write.plan_kv_write(pool, block_ids, offsets), key_value)

    assert torch.equal(expected, pool)
