"""Bits do not depend on the number of threads, which changes while an engine runs (`engine/runner/threads.py`)."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu import elementwise, linear, paged_attention

THREADS = [1, 2, 3, 4, 5, 7, 8]


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _with_threads(compute: Callable[[], Tensor]) -> list[Tensor]:
    results = []
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        results.append(compute())
    return results


def _assert_equal(results: list[Tensor]) -> None:
    for num_threads, result in zip(THREADS, results, strict=True):
        assert torch.equal(results[0], result), f"{num_threads} threads"


@pytest.mark.parametrize("num_rows", [2, 3, 17, 32, 100, 512])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)], ids=str)
def test_linear(shape: tuple[int, int], num_rows: int) -> None:
    torch.manual_seed(num_rows)
    layer = linear.pack_linear((torch.randn(shape) * 0.05).bfloat16())
    x = torch.randn(num_rows, shape[1]).bfloat16()

    _assert_equal(_with_threads(lambda: linear.linear(x, layer)))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33, 200])
def test_norm_and_activation(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    x, gate_up = torch.randn(num_rows, 576), torch.randn(num_rows, 3072).bfloat16()

    _assert_equal(_with_threads(lambda: elementwise.rms_norm(x, 1e-5, torch.bfloat16)))
    _assert_equal(_with_threads(lambda: elementwise.silu_mul(gate_up)))


def test_attention() -> None:
    torch.manual_seed(0)
    pool = torch.randn(120, 2, 2, 3, 16, 64).bfloat16()
    chunks = [(300, 1, list(range(20))), (0, 40, list(range(20, 30))), (260, 130, list(range(80, 110)))]
    query = torch.randn(171, 9, 64).bfloat16()
    workspace = paged_attention.Workspace()

    def attend() -> Tensor:
        plan = paged_attention.plan_attention(pool, chunks, 171, workspace)
        return paged_attention.paged_attention(query, pool, 1, plan)

    _assert_equal(_with_threads(attend))
