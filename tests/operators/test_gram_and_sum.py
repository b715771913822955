"""The Gram matrix and the weighted sum at once, in every implementation, against both alone."""

import dataclasses
import functools
import importlib
import math

import pytest
import torch
from torch import Tensor

from doge_fast.kernels import gram, gram_and_sum, implementations, weighted_sum
from doge_fast.kernels.triton_support import is_interpreted
from tests.laws import assert_torch_knows
from tests.operators.test_gram import error_of_halves, rounding_of_metric
from tests.problems import STORAGE_DTYPES

OPERATOR = "gram_and_sum"

pytestmark = pytest.mark.usefixtures("nan_memory")


def coefficients_for(rows_RN: Tensor, *, halves: bool = True) -> Tensor:
    num_sums = len(rows_RN) // (2 if halves else 1)
    return torch.randn(num_sums, dtype=torch.float64, device=rows_RN.device)


def assert_close(
    out_N: Tensor, rows_CN: Tensor, coefficients_K: Tensor, *, cuts: bool = False
) -> None:
    """Within 2 K + 1 roundings of what was added up, and one of the result.

    `cuts`: Triton's interpreter cuts bits off where it narrows, which is two roundings.
    """
    c_C = coefficients_K.repeat_interleave(len(rows_CN) // len(coefficients_K))
    exact_N, size_N = c_C @ rows_CN.double(), c_C.abs() @ rows_CN.double().abs()
    unit = torch.finfo(torch.float64 if rows_CN.dtype == torch.float64 else torch.float32).eps / 2
    out = torch.finfo(out_N.dtype)
    bound_N = (len(rows_CN) + 1) * unit * size_N + out.eps / (1 if cuts else 2) * exact_N.abs()
    # Below the normal numbers of the result's dtype spacing is absolute.
    bound_N += out.smallest_normal * out.eps
    assert ((out_N.flatten().double() - exact_N).abs() <= bound_N * (1 + 1e-6)).all()


@pytest.mark.parametrize("has_metric", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_it_is_gram_and_the_weighted_sum(dtype, halves, has_metric, implementation, device):
    rows_CN = torch.full((6, 64), math.nan, dtype=dtype, device=device)[:, 5:56]
    rows_CN.copy_(torch.randn(6, 51, device=device))
    moments_N = torch.rand(51, device=device) if has_metric else None
    c_R, out_N = coefficients_for(rows_CN, halves=halves), torch.full_like(rows_CN[0], math.nan)
    options = {"second_moments": moments_N, "eps": 1e-8, "halves": halves}
    options["implementation"] = implementation
    found = gram_and_sum(rows_CN, c_R, out=out_N, **options)
    assert torch.equal(found, gram(rows_CN, **options))
    cuts = implementation == "triton" and is_interpreted()
    assert_close(out_N, rows_CN, c_R, cuts=cuts)


# In pairs, in one and two tiles of sixteen rows, in one of 64, and more than a program has.
@pytest.mark.parametrize("num_sums", [12, 16, 22, 50, 70])
def test_many_sums(num_sums, implementation, device):
    rows_CN, moments_N = torch.randn(2 * num_sums, 70, device=device), torch.rand(70, device=device)
    c_K, out_N = coefficients_for(rows_CN), torch.full((70,), math.nan, device=device)
    options = {"second_moments": moments_N, "halves": True, "implementation": implementation}
    found = gram_and_sum(rows_CN, c_K, out=out_N, **options)
    assert error_of_halves(found, rows_CN, moments_N, 0.0) <= rounding_of_metric(rows_CN)
    assert_close(out_N, rows_CN, c_K)


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_sums", [3, 20, 50])
def test_sums_in_programs_of_several_chunks(
    num_sums, out_dtype, is_aligned, implementation, device, monkeypatch
):
    file = importlib.import_module("doge_fast.kernels.gram")
    pick = file.pick
    few = functools.partial(dataclasses.replace, program_doublings=1, chunk_columns=64)
    monkeypatch.setattr(file, "pick", lambda *args, **options: few(pick(*args, **options)))
    size = 320 if is_aligned else 301
    memory, moments = torch.randn(2 * num_sums, 640, device=device), torch.rand(640, device=device)
    blocks, vectors = [memory[:, :size], memory[:, 320 : 320 + size]], [moments[:size]] * 2
    outs = [torch.full((size,), math.nan, dtype=out_dtype, device=device) for _ in blocks]
    c_K = coefficients_for(memory)
    options = {"second_moments": vectors, "halves": True, "implementation": implementation}
    found = gram_and_sum(blocks, c_K, out=outs, **options)
    whole_CN, moments_N = torch.cat(blocks, dim=1), torch.cat(vectors)
    assert error_of_halves(found, whole_CN, moments_N, 0.0) <= rounding_of_metric(whole_CN)
    cuts = implementation == "triton" and is_interpreted()
    for block, out in zip(blocks, outs, strict=True):
        assert_close(out, block, c_K, cuts=cuts)


@pytest.fixture
def compiled() -> str:
    """The implementation in C++, where it can run."""
    reason = implementations("cpu")["cpp"]
    if reason is not None:
        pytest.skip(f"cpp: {reason}")
    return "cpp"


# Up to 8 sums are made together.
@pytest.mark.parametrize("num_sums", [1, 7, 8, 9, 20, 66])
@pytest.mark.parametrize("out_dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_compiled_over_several_tiles_and_a_rest(num_sums, dtype, out_dtype, compiled):
    memory = torch.full((2 * num_sums, 6144), math.nan, dtype=dtype)
    rows_CN = memory[:, 5:5556]
    rows_CN.copy_(torch.randn(2 * num_sums, 5551))
    c_K, moments_N = coefficients_for(rows_CN), torch.rand(5551)
    # The neighbours of an output stay.
    results = torch.full((6144,), 7.0, dtype=out_dtype)
    out_N = results[3:5554]
    run = functools.partial(gram_and_sum, eps=1e-8, halves=True, implementation=compiled)
    found = run(rows_CN, c_K, out=out_N, second_moments=moments_N)
    alone = gram(rows_CN, second_moments=moments_N, eps=1e-8, halves=True, implementation=compiled)
    assert torch.equal(found, alone)
    assert_close(out_N, rows_CN, c_K)
    assert (results[:3] == 7).all()
    assert (results[5554:] == 7).all()


def test_blocks_of_all_dtypes_go_to_outputs_of_any(implementation, device):
    shapes = [(3, 5), (701,), (), (0,), (2, 3, 4), (37,), (103,), (9,)]
    blocks, outs, moments = [], [], []
    for index, shape in enumerate(shapes):
        dtype, out_dtype = STORAGE_DTYPES[index % 4], STORAGE_DTYPES[(index + index // 4) % 4]
        blocks.append(torch.randn(6, math.prod(shape), device=device).to(dtype))
        outs.append(torch.full(shape, math.nan, dtype=out_dtype, device=device))
        moments.append(torch.rand(shape, device=device) if index % 3 else None)
    # Coefficients may be a view, and of another dtype.
    c_K = torch.tensor([0.3, 9, -0.7, 9, 0.2], device=device)[::2]
    options = {"second_moments": moments, "eps": 1e-4, "halves": True}
    options["implementation"] = implementation
    found = gram_and_sum(blocks, c_K, out=outs, **options)
    assert torch.equal(found, gram(blocks, **options))
    cuts = implementation == "triton" and is_interpreted()
    for block, out in zip(blocks, outs, strict=True):
        assert_close(out, block, c_K.double(), cuts=cuts)


def test_a_sum_of_coefficient_zero_adds_nothing(implementation, device):
    rows_CN = torch.randn(6, 1000, device=device)
    c_K = torch.tensor([0.0, 1.0, -0.0], dtype=torch.float64, device=device)
    out_N = torch.full((1000,), math.nan, device=device)
    run = functools.partial(gram_and_sum, halves=True, implementation=implementation)
    run(rows_CN, c_K, out=out_N)
    assert torch.equal(out_N, rows_CN[2] + rows_CN[3])
    run(rows_CN, torch.zeros_like(c_K), out=out_N)
    assert torch.equal(out_N, torch.zeros_like(out_N))
    rows_CN[0, 5] = math.nan
    found = run(rows_CN, c_K, out=out_N)
    assert found.diagonal().isfinite().tolist() == [False, True, True]
    expected_N = rows_CN[2] + rows_CN[3]
    assert torch.equal(out_N[6:], expected_N[6:])


def test_compiled_does_not_depend_on_threads(compiled):
    blocks = [
        torch.randn(20, columns).to(dtype)
        for columns, dtype in ((70_001, torch.float32), (5, torch.bfloat16), (9_700, torch.float64))
    ]
    c_K = coefficients_for(blocks[0])
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs = [torch.empty_like(block[0]) for block in blocks]
        gram_KK = gram_and_sum(blocks, c_K, out=outs, halves=True, implementation=compiled)
        results.append([gram_KK, *outs])
    torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_a_result_larger_than_the_caches(compiled):
    """Written without going through them; each processor has another limit."""
    rows_CN = torch.randn(2, (40 << 20) // 4 + 3)
    out_N = torch.full_like(rows_CN[0], math.nan)[1:-1]
    c_1 = torch.ones(1)
    gram_and_sum(rows_CN[:, 1:-1], c_1, out=out_N, halves=True, implementation=compiled)
    assert torch.equal(out_N, rows_CN.sum(0)[1:-1])


def test_torch_knows_it(implementation, device):
    blocks = [torch.randn(4, 20, device=device), torch.randn(4, 7, device=device).bfloat16()]
    outs = [torch.zeros(20, device=device), torch.zeros(7, device=device)]
    moments = [torch.rand(20, device=device), None]
    for halves in (False, True):
        arguments = (blocks, coefficients_for(blocks[0], halves=halves), outs, moments, 1e-8)
        assert_torch_knows(OPERATOR, (*arguments, halves), implementation, changed=outs[0])
    # Parameters, as a caller may hand over.
    blocks[0].requires_grad_()
    c_K = torch.ones(2, device=device)
    gram_and_sum(blocks, c_K, out=outs, halves=True, implementation=implementation)
    assert not outs[0].requires_grad


def test_halves_need_a_coefficient_for_each_sum(implementation, device):
    rows_CN, out_N = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    run = functools.partial(gram_and_sum, halves=True, implementation=implementation)
    with pytest.raises(ValueError, match=r"each of 2 sums .* \[4\]"):
        run(rows_CN, torch.ones(4, device=device), out=out_N)
    with pytest.raises(ValueError, match="halves"):
        run(rows_CN[:3], torch.ones(1, device=device), out=out_N)
    assert (out_N == 1).all()


@pytest.mark.skipif(implementations("cpu")["cpp"] is not None, reason="C++ cannot run here")
def test_more_rows_than_the_kernel_takes():
    rows_CN = torch.randn(2050, 4)
    c_K, out_N = coefficients_for(rows_CN), torch.empty(4)
    options = {"halves": True, "implementation": "cpp"}
    found = gram_and_sum(rows_CN, c_K, out=out_N, **options)
    assert torch.equal(found, gram(rows_CN, **options))
    expected_N = weighted_sum(rows_CN, c_K.repeat_interleave(2), implementation="cpp")
    assert torch.equal(out_N, expected_N)
