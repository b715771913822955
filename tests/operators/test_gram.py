"""The Gram operator, in every implementation, against the reference in float64."""

import dataclasses
import functools
import importlib
import math

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.kernels import gram, implementations
from tests.laws import assert_torch_knows, normalised_error
from tests.problems import GRADIENT_PROBLEMS, STORAGE_DTYPES

pytestmark = pytest.mark.usefixtures("nan_memory")

# The longest sum that the operator promises to leave in float32.
MAX_CHUNK = 16384


def rounding(grads_KN: Tensor) -> float:
    """Error of a cosine: one rounding per product, and a random walk of them over a chunk."""
    is_double = grads_KN.dtype == torch.float64
    unit = torch.finfo(torch.float64 if is_double else torch.float32).eps / 2
    length = grads_KN.shape[1] if is_double else min(grads_KN.shape[1], MAX_CHUNK)
    return (1 + math.sqrt(length)) * unit


def rounding_of_both(grads_KN: Tensor) -> float:
    """In float64 the reference is rounded as much as we are; else it is exact beside us."""
    return rounding(grads_KN) * (2 if grads_KN.dtype == torch.float64 else 1)


@pytest.mark.parametrize("problem", GRADIENT_PROBLEMS, ids=str)
def test_gram_is_the_reference(problem, implementation, device):
    grads_KN = problem.sample(device)
    gram_KK = gram(grads_KN, implementation=implementation)
    assert gram_KK.dtype == torch.float64
    assert gram_KK.device == device
    assert torch.equal(gram_KK, gram_KK.T)
    assert normalised_error(gram_KK, reference.gram(grads_KN.double())) <= rounding(grads_KN)


def test_rows_of_more_than_two_tiles(implementation, device):
    grads_KN = torch.randn(130, 48, device=device)
    gram_KK = gram(grads_KN, implementation=implementation)
    error = normalised_error(gram_KK, reference.gram(grads_KN.double()))
    assert error <= rounding(grads_KN)


@pytest.mark.parametrize(
    "num_rows",
    [
        *(1, 2, 3, 4, 5, 8, 9, 10, 11, 16, 17, 33, 65),
        # Rows that end inside a tile; minutes under Triton's interpreter.
        *(pytest.param(rows, marks=pytest.mark.soak) for rows in (73, 88, 105, 129, 137)),
    ],
)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_every_kind_of_launch(num_rows, dtype, implementation, device):
    grads_KN = torch.randn(num_rows, 150, device=device).to(dtype)
    exact_KK = reference.gram(grads_KN.double())
    gram_KK = gram(grads_KN, implementation=implementation)
    assert normalised_error(gram_KK, exact_KK) <= rounding(grads_KN)


@pytest.mark.parametrize("columns", [16, 5], ids=["aligned", "ragged"])
@pytest.mark.parametrize(
    ("num_rows", "dtype", "num_blocks"),
    [(3, torch.float32, 700), (22, torch.bfloat16, 500), (66, torch.float32, 40)],
    ids=str,
)
def test_programs_of_several_chunks_leave_none_out(
    num_rows, dtype, num_blocks, columns, implementation, device, monkeypatch
):
    """More short blocks than there are programs: programs get fewer and fewer of them."""
    if implementation == "triton":
        file = importlib.import_module("doge_fast.kernels.gram")
        pick, few = file.pick, functools.partial(dataclasses.replace, program_doublings=2)
        monkeypatch.setattr(file, "pick", lambda *args, **options: few(pick(*args, **options)))
        num_blocks = 21
    grads_KN = torch.randn(num_rows, columns * num_blocks, device=device).to(dtype)
    blocks = list(grads_KN.split(columns, dim=1))
    gram_KK = gram(blocks, implementation=implementation)
    assert normalised_error(gram_KK, reference.gram(grads_KN.double())) <= rounding(grads_KN)
    assert torch.equal(gram_KK, gram(blocks, implementation=implementation))


@pytest.fixture
def compiled() -> str:
    """The implementation in C++, where it can run."""
    reason = implementations("cpu")["cpp"]
    if reason is not None:
        pytest.skip(f"cpp: {reason}")
    return "cpp"


# Either side of where rows are read at once (up to 4 or 7), of where they are multiplied in groups
# (beyond 32 or 48), and of where they are copied together (beyond 80 or 128).
@pytest.mark.parametrize("num_rows", [4, 5, 7, 8, 22, 32, 33, 48, 49, 80, 81, 110, 128, 129])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_compiled_gram_over_several_tiles_and_a_rest(num_rows, dtype, compiled):
    memory = torch.full((num_rows, 6144), math.nan, dtype=dtype)
    grads_KN = memory[:, 5:5555]
    grads_KN.copy_(torch.randn(num_rows, 5550))
    exact_KK = reference.gram(grads_KN.double())
    tolerance = rounding_of_both(grads_KN)
    # One block, and one cut where no tile ends.
    for blocks in (grads_KN, [grads_KN[:, :1029], grads_KN[:, 1029:1031], grads_KN[:, 1031:]]):
        gram_KK = gram(blocks, implementation=compiled)
        assert normalised_error(gram_KK, exact_KK) <= tolerance


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_compiled_gram_has_a_place_for_every_pair_of_rows(dtype, compiled):
    """Sums stand in the order in which they are added to, which is not that of the pairs."""
    for num_rows in range(1, 142):
        grads_KN = torch.randn(num_rows, 70).to(dtype)
        exact_KK = reference.gram(grads_KN.double())
        gram_KK = gram(grads_KN, implementation=compiled)
        assert normalised_error(gram_KK, exact_KK) <= rounding_of_both(grads_KN), num_rows


def test_more_than_a_thousand_rows(device):
    """What runs unasked takes 512 domains and their targets, and more."""
    for num_rows in (513, 1030):
        grads_KN = torch.randn(num_rows, 70, device=device)
        exact_KK = reference.gram(grads_KN.double())
        assert normalised_error(gram(grads_KN), exact_KK) <= rounding(grads_KN)


def test_blocks_of_all_dtypes_at_once(implementation, device):
    blocks = [torch.randn(5, 33 + i, device=device).to(d) for i, d in enumerate(STORAGE_DTYPES * 3)]
    # An empty one adds nothing.
    blocks.insert(4, torch.empty(5, 0, device=device))
    exact_KK = reference.gram(torch.cat([block.double() for block in blocks], dim=1))
    gram_KK = gram(blocks, implementation=implementation)
    assert normalised_error(gram_KK, exact_KK) <= rounding(blocks[0])


def test_only_empty_blocks_give_zeros(implementation, device):
    gram_KK = gram([torch.empty(3, 0, device=device)] * 2, implementation=implementation)
    assert torch.equal(gram_KK, torch.zeros(3, 3, dtype=torch.float64, device=device))


def test_a_non_finite_row_shows_on_the_diagonal(implementation, device):
    grads_KN = torch.randn(3, 100, device=device)
    grads_KN[1, 50] = math.inf
    diagonal_K = gram(grads_KN, implementation=implementation).diagonal()
    assert diagonal_K.isfinite().tolist() == [True, False, True]


def test_columns_beyond_the_block_are_not_read(implementation, device):
    """Rows stand in wider memory; what lies between them is not ours."""
    memory = torch.full((4, 200), math.nan, device=device)
    memory[:, 7:150] = 1
    gram_KK = gram(memory[:, 7:150], implementation=implementation)
    assert torch.equal(gram_KK, torch.full_like(gram_KK, 143))


def exact_metric(moments_N: Tensor, eps: float) -> Tensor:
    """d_n in float64."""
    return torch.where(moments_N == 0, 0, 1 / (moments_N.double().sqrt() + eps))


def exact_gram(grads_KN: Tensor, moments_N: Tensor, eps: float) -> Tensor:
    """The Gram matrix in the metric of second moments, in float64."""
    return reference.gram(grads_KN.double() * exact_metric(moments_N, eps).sqrt())


def rounding_of_metric(grads_KN: Tensor) -> float:
    """A root, a sum, a division and two products are rounded beside what is without a metric."""
    unit = torch.finfo(torch.float64 if grads_KN.dtype == torch.float64 else torch.float32).eps / 2
    return rounding_of_both(grads_KN) + 6 * unit


def sample_moments(num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N] of several scales, with zeros."""
    moments_N = torch.randn(num_columns, device=device).square() * 1e-3
    moments_N[::7] *= 1e-4
    moments_N[3::11] = 0
    return moments_N.to(dtype)


@pytest.mark.parametrize(
    "num_rows",
    [
        *(1, 2, 3, 5, 8, 9, 12, 13, 17),
        *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (33, 65)),
        *(pytest.param(rows, marks=pytest.mark.soak) for rows in (10, 11, 22, 49, 129, 137)),
    ],
)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_metric_in_every_kind_of_launch(num_rows, dtype, implementation, device):
    """Second moments of each dtype in turn; rows in wider memory, aligned and not."""
    index = STORAGE_DTYPES.index(dtype) + num_rows
    for first, columns in ((16, 160), (5, 150)):
        memory = torch.full((num_rows, 192), math.nan, dtype=dtype, device=device)
        grads_KN = memory[:, first : first + columns]
        grads_KN.copy_(torch.randn(num_rows, columns, device=device))
        for moments_dtype in (torch.float32, STORAGE_DTYPES[index % len(STORAGE_DTYPES)]):
            moments_N = sample_moments(columns, moments_dtype, device)
            gram_KK = gram(
                grads_KN, second_moments=moments_N, eps=1e-8, implementation=implementation
            )
            assert torch.equal(gram_KK, gram_KK.T)
            exact_KK = exact_gram(grads_KN, moments_N, 1e-8)
            assert normalised_error(gram_KK, exact_KK) <= rounding_of_metric(grads_KN)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_metric_of_some_blocks(dtype, implementation, device):
    """Every pair of dtypes, blocks without a metric among them, moments of any shape."""
    blocks, moments, exact = [], [], []
    for index, moments_dtype in enumerate([*STORAGE_DTYPES, None, *STORAGE_DTYPES, None]):
        columns = 32 + index
        blocks.append(torch.randn(5, columns, device=device).to(dtype))
        if moments_dtype is None:
            moments.append(None)
            exact.append(reference.gram(blocks[-1].double()))
        else:
            v_N = sample_moments(columns, moments_dtype, device)
            moments.append(v_N.view(1, columns, 1) if index % 2 else v_N)
            exact.append(exact_gram(blocks[-1], v_N, 1e-4))
    blocks.append(torch.empty(5, 0, device=device))
    moments.append(torch.empty(0, device=device))
    gram_KK = gram(blocks, second_moments=moments, eps=1e-4, implementation=implementation)
    error = normalised_error(gram_KK, torch.stack(exact).sum(0))
    assert error <= rounding_of_metric(blocks[0])


# The last is zero, or its inverse infinite, in float32.
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-40])
def test_columns_that_no_gradient_has_reached_count_as_nothing(eps, implementation, device):
    grads_KN = torch.randn(3, 64, device=device)
    grads_KN[:, 10:20] = 0
    moments_N = torch.rand(64, device=device) + 0.1
    moments_N[10:20] = 0
    gram_KK = gram(grads_KN, second_moments=moments_N, eps=eps, implementation=implementation)
    kept = torch.cat([grads_KN[:, :10], grads_KN[:, 20:]], dim=1)
    of_kept = torch.cat([moments_N[:10], moments_N[20:]])
    exact_KK = exact_gram(kept, of_kept, eps)
    assert normalised_error(gram_KK, exact_KK) <= rounding_of_metric(grads_KN)


# NumPy, under Triton's interpreter, warns of inf * 0.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_metric_hides_no_row_that_is_not_finite(value, implementation, device):
    for num_rows in (3, 20):
        for moment in (0.0, 1.0):
            grads_KN = torch.randn(num_rows, 100, device=device)
            grads_KN[1, 50] = value
            moments_N = torch.full((100,), 1.0, device=device)
            moments_N[50] = moment
            gram_KK = gram(grads_KN, second_moments=moments_N, implementation=implementation)
            is_finite = [row != 1 for row in range(num_rows)]
            assert gram_KK.diagonal().isfinite().tolist() == is_finite


def test_infinite_moments_count_as_nothing(implementation, device):
    """float16 overflows; AdamW does not move there."""
    grads_KN = torch.randn(3, 40, device=device)
    moments_N = torch.ones(40, device=device)
    moments_N[7] = math.inf
    gram_KK = gram(grads_KN, second_moments=moments_N, implementation=implementation)
    exact_KK = exact_gram(grads_KN, moments_N, 0)
    assert normalised_error(gram_KK, exact_KK) <= rounding_of_metric(grads_KN)


def test_moments_too_small_for_most_of_float32_are_divided_by(implementation, device):
    """Subnormal: a GPU may take them for zeros."""
    grads_KN = torch.randn(3, 40, device=device)
    moments_N = torch.full((40,), 1e-40, device=device)
    gram_KK = gram(grads_KN, second_moments=moments_N, implementation=implementation)
    exact_KK = exact_gram(grads_KN, moments_N, 0)
    assert normalised_error(gram_KK, exact_KK) <= rounding_of_metric(grads_KN)


def test_a_metric_of_ones_changes_nothing_else(implementation, device):
    """The laws of a metric: scale of v, order of columns, sums over blocks."""
    grads_KN = torch.randn(6, 96, device=device)
    moments_N = torch.rand(96, device=device) + 0.1
    run = functools.partial(gram, implementation=implementation)
    plain_KK = run(grads_KN)
    tolerance = rounding_of_metric(grads_KN)
    ones_KK = run(grads_KN, second_moments=torch.ones(96, device=device))
    assert normalised_error(ones_KK, plain_KK) <= tolerance
    gram_KK = run(grads_KN, second_moments=moments_N)
    # 4 v: exactly half the metric.
    half_KK = run(grads_KN, second_moments=4 * moments_N)
    assert normalised_error(2 * half_KK, gram_KK) <= tolerance
    order = torch.randperm(96, device=device)
    shuffled_KK = run(grads_KN[:, order].contiguous(), second_moments=moments_N[order])
    assert normalised_error(shuffled_KK, gram_KK) <= tolerance
    halves = [part.contiguous() for part in grads_KN.split(40, dim=1)]
    parts_KK = run(halves, second_moments=list(moments_N.split(40)))
    assert normalised_error(parts_KK, gram_KK) <= tolerance


def test_no_moments_at_all_are_no_metric(implementation, device):
    blocks = [torch.randn(4, 100, device=device), torch.randn(4, 7, device=device).bfloat16()]
    gram_KK = gram(blocks, implementation=implementation)
    same_KK = gram(blocks, second_moments=[None, None], eps=1e-8, implementation=implementation)
    assert torch.equal(gram_KK, same_KK)


@pytest.mark.parametrize("num_rows", [4, 7, 8, 9, 22, 49, 81, 128, 129])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_compiled_metric_over_several_tiles_and_a_rest(num_rows, dtype, compiled):
    memory = torch.full((num_rows, 6144), math.nan, dtype=dtype)
    grads_KN = memory[:, 5:5555]
    grads_KN.copy_(torch.randn(num_rows, 5550))
    moments_N = sample_moments(5550, dtype, grads_KN.device)
    exact_KK = exact_gram(grads_KN, moments_N, 1e-8)
    cut = (1029, 2, 4519)
    blocks, moments = list(grads_KN.split(cut, dim=1)), list(moments_N.split(cut))
    grams = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows, v in ((grads_KN, moments_N), (blocks, moments)):
            grams.append(gram(rows, second_moments=v, eps=1e-8, implementation=compiled))
    torch.set_num_threads(before)
    for gram_KK in grams:
        assert normalised_error(gram_KK, exact_KK) <= rounding_of_metric(grads_KN)
    assert all(map(torch.equal, grams[:2], grams[2:]))


def exact_halves(rows_CN: Tensor, moments_N: Tensor | None, eps: float) -> Tensor:
    """[K + 1, K]: of sums of two rows, and then of these two, in float64."""
    metric_N = 1.0 if moments_N is None else exact_metric(moments_N, eps)
    first_KN, second_KN = rows_CN[0::2].double(), rows_CN[1::2].double()
    sums_KN = first_KN + second_KN
    products_K = (first_KN * metric_N * second_KN).sum(1)
    return torch.cat([(sums_KN * metric_N) @ sums_KN.T, products_K[None]])


def error_of_halves(actual: Tensor, rows_CN: Tensor, moments_N: Tensor | None, eps: float) -> float:
    """The largest error of a cosine, of sums or of halves."""
    assert actual.dtype == torch.float64
    gram_KK, products_K = actual[:-1], actual[-1]
    assert torch.equal(gram_KK, gram_KK.T)
    exact = exact_halves(rows_CN, moments_N, eps)
    metric_N = 1.0 if moments_N is None else exact_metric(moments_N, eps)
    norms_C = (rows_CN.double().square() * metric_N).sum(1).sqrt()
    error_K = (products_K - exact[-1]).abs() / norms_C.view(-1, 2).prod(1)
    return max(normalised_error(gram_KK, exact[:-1]), float(error_K.max()))


@pytest.mark.parametrize(
    "num_sums",
    [
        *(1, 2, 3, 7, 8, 11, 12, 17, 33),
        *(pytest.param(sums, marks=pytest.mark.soak) for sums in (5, 16, 22, 64, 65, 129)),
    ],
)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_halves_in_every_kind_of_launch(num_sums, dtype, implementation, device):
    """With a metric and without; rows in wider memory, aligned and not."""
    for first, columns in ((16, 160), (5, 150)):
        memory = torch.full((2 * num_sums, 192), math.nan, dtype=dtype, device=device)
        rows_CN = memory[:, first : first + columns]
        rows_CN.copy_(torch.randn(2 * num_sums, columns, device=device))
        for moments_N in (None, sample_moments(columns, torch.float32, device)):
            found = gram(
                *(rows_CN,),
                second_moments=moments_N,
                eps=1e-8,
                halves=True,
                implementation=implementation,
            )
            assert found.shape == (num_sums + 1, num_sums)
            error = error_of_halves(found, rows_CN, moments_N, 1e-8)
            assert error <= rounding_of_metric(rows_CN)


@pytest.mark.parametrize("num_sums", [4, 7, 8, 9, 22, 49, 81, 129])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_compiled_halves_over_several_tiles_and_a_rest(num_sums, dtype, compiled):
    memory = torch.full((2 * num_sums, 6144), math.nan, dtype=dtype)
    rows_CN = memory[:, 5:5555]
    rows_CN.copy_(torch.randn(2 * num_sums, 5550))
    moments_N = sample_moments(5550, dtype, rows_CN.device)
    cut = (1029, 2, 4519)
    blocks, moments = list(rows_CN.split(cut, dim=1)), list(moments_N.split(cut))
    run = functools.partial(gram, eps=1e-8, halves=True, implementation=compiled)
    for of_rows, of_blocks in ((None, None), (moments_N, moments)):
        found = run(rows_CN, second_moments=of_rows)
        assert error_of_halves(found, rows_CN, of_rows, 1e-8) <= rounding_of_metric(rows_CN)
        found = run(blocks, second_moments=of_blocks)
        assert error_of_halves(found, rows_CN, of_rows, 1e-8) <= rounding_of_metric(rows_CN)


@pytest.mark.parametrize("num_sums", [3, 20, 66])
def test_halves_in_programs_of_several_chunks(num_sums, implementation, device, monkeypatch):
    file = importlib.import_module("doge_fast.kernels.gram")
    pick, few = file.pick, functools.partial(dataclasses.replace, program_doublings=2)
    monkeypatch.setattr(file, "pick", lambda *args, **options: few(pick(*args, **options)))
    rows_CN = torch.randn(2 * num_sums, 16 * 11, device=device)
    blocks = list(rows_CN.split(16, dim=1))
    found = gram(blocks, halves=True, implementation=implementation)
    assert error_of_halves(found, rows_CN, None, 0) <= rounding(rows_CN)
    assert torch.equal(found, gram(blocks, halves=True, implementation=implementation))


def test_halves_that_cancel_leave_what_is_left(implementation, device):
    """The square of a sum is not a difference of large numbers."""
    rows_CN = torch.randn(2, 300, device=device) * 1e-3
    rows_CN[0] += 1024
    rows_CN[1] -= 1024
    gram_1, product_1 = gram(rows_CN, halves=True, implementation=implementation)
    exact_1, exact_product_1 = exact_halves(rows_CN, None, 0)
    torch.testing.assert_close(gram_1, exact_1, rtol=1e-5, atol=0)
    torch.testing.assert_close(product_1, exact_product_1, rtol=1e-5, atol=0)


def test_halves_of_all_dtypes_and_some_moments_at_once(implementation, device):
    blocks, moments, exact = [], [], []
    for index, dtype in enumerate(STORAGE_DTYPES * 2):
        blocks.append(torch.randn(6, 33 + index, device=device).to(dtype))
        v_N = sample_moments(33 + index, torch.float32, device)
        moments.append(None if index % 3 else v_N)
        exact.append(exact_halves(blocks[-1], moments[-1], 1e-4))
    blocks.append(torch.empty(6, 0, device=device))
    moments.append(None)
    run = functools.partial(gram, halves=True, implementation=implementation)
    found = run(blocks, second_moments=moments, eps=1e-4)
    exact_KK = torch.stack(exact).sum(0)
    torch.testing.assert_close(found, exact_KK, rtol=0, atol=2e-6 * exact_KK.abs().max().item())
    assert torch.equal(run(blocks[-1:]), torch.zeros(4, 3, dtype=torch.float64, device=device))


# NumPy, under Triton's interpreter, warns of inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("num_sums", [3, 20])
def test_a_half_that_is_not_finite_shows(num_sums, implementation, device):
    rows_CN = torch.randn(2 * num_sums, 100, device=device)
    rows_CN[2, 50] = math.inf
    rows_CN[3, 50] = -math.inf
    found = gram(rows_CN, halves=True, implementation=implementation)
    is_finite = [row != 1 for row in range(num_sums)]
    assert found.diagonal().isfinite().tolist() == is_finite
    assert found[-1].isfinite().tolist() == is_finite


def test_halves_need_an_even_number_of_rows(implementation, device):
    with pytest.raises(ValueError, match="halves"):
        gram(torch.ones(3, 8, device=device), halves=True, implementation=implementation)


def test_plain_torch_keeps_float64(device):
    grads_KN = torch.randn(7, 5000, dtype=torch.float64, device=device)
    moments_N = torch.rand(5000, dtype=torch.float64, device=device)
    gram_KK = gram(grads_KN, second_moments=moments_N, eps=1e-8, implementation="torch")
    assert normalised_error(gram_KK, exact_gram(grads_KN, moments_N, 1e-8)) <= 1e-12


@pytest.mark.parametrize("num_rows", [6, 22, 97])
def test_compiled_gram_does_not_depend_on_threads(num_rows, compiled):
    blocks = [
        torch.randn(num_rows, columns).to(dtype)
        for columns, dtype in ((70_001, torch.float32), (5, torch.bfloat16), (9_700, torch.float64))
    ]
    before = torch.get_num_threads()
    grams = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        grams.append(gram(blocks, implementation=compiled))
    torch.set_num_threads(before)
    assert torch.equal(grams[0], grams[1])
    assert torch.equal(grams[0], grams[2])


@pytest.mark.parametrize("switch", ["precision", "autocast"])
def test_plain_torch_ignores_the_users_precision_switch(switch):
    """tf32 and bfloat16 products would cost the diagonal its fourth digit."""
    grads_KN = torch.randn(5, 5000)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        if switch == "precision":
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with torch.autocast("cpu", enabled=switch == "autocast"):
            gram_KK = gram(grads_KN, implementation="torch")
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    exact_KK = reference.gram(grads_KN.double())
    assert normalised_error(gram_KK, exact_KK) <= torch.finfo(torch.float64).eps * 5000


def test_torch_knows_it(implementation, device):
    blocks = [torch.randn(3, 20, device=device), torch.randn(3, 7, device=device).bfloat16()]
    assert_torch_knows("gram", (blocks,), implementation)
    moments = [torch.rand(20, device=device), None]
    assert_torch_knows("gram", (blocks, moments, 1e-8), implementation)
    halves = [block[:2] for block in blocks]
    assert_torch_knows("gram", (halves, moments, 1e-8, True), implementation)


@pytest.mark.skipif(implementations("cpu")["cpp"] is not None, reason="C++ cannot run here")
def test_more_rows_than_the_kernel_takes_are_plain_torch_s():
    rows = torch.randn(2049, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gram(rows, implementation="cpp"), gram(rows, implementation="torch"))
