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
        monkeypatch.setattr(file, "pick", lambda *args: few(pick(*args)))
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


@pytest.mark.skipif(implementations("cpu")["cpp"] is not None, reason="C++ cannot run here")
def test_more_rows_than_the_kernel_takes_are_plain_torch_s():
    rows = torch.randn(2049, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gram(rows, implementation="cpp"), gram(rows, implementation="torch"))
