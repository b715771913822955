"""Long rows: within 1e-6 of the largest entry, for gradients of one sign too, and the same twice.

A float32 product of two rows of 40 million numbers of one sign is a percent off where it is taken
in one go; what is tested here is that nobody does.
"""

import pytest
import torch
from torch import Tensor

from doge_fast.kernels import gram, weighted_sum

NUM_ROWS = 7
NUM_COLUMNS = 40_000_000
# Triton's interpreter and the emulator of CUDA take seconds for so many, more than a chunk of their
# kernels has.
NUM_COLUMNS_INTERPRETED = 9_000
BAR = 1e-6
CHUNK = 1 << 20


@pytest.fixture(
    scope="module", params=[pytest.param("one sign", marks=pytest.mark.exhaustive), "both signs"]
)
def long_rows(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """[K, N] float32 and its Gram matrix in float64; 1.1 GB."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    # Where the signs differ errors cancel, and a tenth says as much.
    num_columns = NUM_COLUMNS if request.param == "one sign" else NUM_COLUMNS // 10
    rows_KN = torch.empty(NUM_ROWS, num_columns, device=device)
    for row_N in rows_KN:
        row_N.uniform_(0 if request.param == "one sign" else -1, 1, generator=generator)
    return rows_KN, exact_gram(rows_KN)


def exact_gram(rows_KN: Tensor) -> Tensor:
    gram_KK = torch.zeros(len(rows_KN), len(rows_KN), dtype=torch.float64, device=rows_KN.device)
    for part_KC in rows_KN.split(CHUNK, dim=1):
        part_KC = part_KC.double()
        gram_KK += part_KC @ part_KC.T
    return gram_KK


def is_slow(implementation: str) -> bool:
    return implementation in ("triton", "cuda") and not torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_long_rows_lose_nothing_twice(dtype, long_rows, implementation):
    rows_KN, exact_KK = long_rows
    if is_slow(implementation) or dtype != torch.float32:
        columns = NUM_COLUMNS_INTERPRETED if is_slow(implementation) else NUM_COLUMNS // 20
        rows_KN = rows_KN[:, :columns].to(dtype)
        exact_KK = exact_gram(rows_KN)
    found_KK = gram(rows_KN, implementation=implementation)
    assert (found_KK - exact_KK).abs().max() <= BAR * exact_KK.abs().max()
    assert torch.equal(found_KK, gram(rows_KN, implementation=implementation))
    coefficients_K = torch.rand(NUM_ROWS, dtype=torch.float64, device=rows_KN.device)
    sums = [weighted_sum(rows_KN, coefficients_K, implementation=implementation) for _ in range(2)]
    assert torch.equal(*sums)


# In panels, in groups of panels, and copied together.
@pytest.mark.parametrize(
    "num_rows", [22, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (97, 129))]
)
@pytest.mark.parametrize(
    "terms",
    [
        torch.tensor([1.876224398612976]),
        torch.tensor([1.8759765625]).half(),
        torch.tensor([0.58984375, 0.00131988525390625]).bfloat16(),
    ],
    ids=lambda terms: str(terms.dtype),
)
def test_many_rows_of_equal_terms_lose_nothing(terms, num_rows, implementation):
    """Equal terms, and two in turn, are rounded the same way each time."""
    if implementation != "cpp":
        pytest.skip("how long products stay in float32 on a CPU is tested")
    repeats = (1 << 24) // len(terms)
    found_KK = gram(terms.repeat(repeats).expand(num_rows, -1), implementation=implementation)
    exact = repeats * float(terms.double().square().sum())
    assert (found_KK - exact).abs().max() <= BAR * exact
