"""Sums of segments, in every implementation, against the reference in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.kernels import segment_sum
from doge_fast.kernels.triton_support import is_interpreted
from tests.laws import assert_torch_knows

OPERATOR = "segment_sum"
pytestmark = pytest.mark.usefixtures("nan_memory")

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Problem:
    """Segments and what they are sums of; a name for each kind of gradient."""

    lengths: list[int]
    width: int
    rows: int = 1
    """Of a group; the number of segments is a multiple of it."""
    is_ordered: bool = False
    has_factor: bool = False
    has_statistics: bool = False
    is_equal: bool = False
    dtype: torch.dtype = FLOAT32
    out_dtype: torch.dtype = FLOAT32

    def terms(self, device: torch.device) -> dict[str, Tensor]:
        """The arguments after `add`."""
        num_tokens = sum(self.lengths)
        made: dict[str, Tensor] = {}
        if self.is_ordered:
            segments = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
            made["segment_T"] = segments.to(device)
        elif not self.is_equal:
            borders = torch.tensor([0, *self.lengths]).cumsum(0)
            made["borders"] = borders.to(device)
        if self.is_ordered:
            made["order"] = torch.randperm(num_tokens).to(device)
        if self.has_factor:
            values_TD = torch.randn(num_tokens, self.width, device=device) * 3 + 5
            made["factor_TD"] = values_TD.to(self.dtype)
        if self.has_statistics:
            wide = made["factor_TD"].to(FLOAT64 if self.dtype == FLOAT64 else FLOAT32)
            made["mean_T"] = wide.mean(1)
            made["rstd_T"] = wide.var(1, correction=0).add(1e-5).rsqrt()
        return made

    def values(self, device: torch.device) -> Tensor:
        return torch.randn(sum(self.lengths), self.width, device=device).to(self.dtype)

    def out(self, device: torch.device) -> Tensor:
        """[G, R, D], whose matrices are not neighbours."""
        groups = len(self.lengths) // self.rows
        memory = torch.randn(groups, self.rows * self.width + 7, device=device)
        memory = memory.to(self.out_dtype)
        return memory[:, : self.rows * self.width].unflatten(1, (self.rows, self.width))


def exact_sums(problem: Problem, values: Tensor, terms: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[G, R, D] float64 sums, and the sums of the sizes, which rounding is a share of."""
    terms_TD = values.double()
    if problem.has_factor:
        factor_TD = terms["factor_TD"].double()
        if problem.has_statistics:
            mean_T, rstd_T = terms["mean_T"].double(), terms["rstd_T"].double()
            factor_TD = (factor_TD - mean_T[:, None]) * rstd_T[:, None]
        terms_TD = terms_TD * factor_TD
    if problem.is_ordered:
        terms_TD = terms_TD[terms["order"]]
    borders = [sum(problem.lengths[:end]) for end in range(len(problem.lengths) + 1)]
    shape = (-1, problem.rows, problem.width)
    sums, sizes = (reference.segment_sum(part, borders) for part in (terms_TD, terms_TD.abs()))
    return sums.view(shape), sizes.view(shape)


PROBLEMS = {
    "a bias": Problem([40] * 3, 24, is_equal=True),
    "a bias of 16 bits": Problem([40] * 3, 24, is_equal=True, dtype=BFLOAT16, out_dtype=BFLOAT16),
    "unequal domains": Problem([5, 0, 91, 1], 24),
    "a gain": Problem([40] * 3, 24, is_equal=True, has_factor=True, has_statistics=True),
    "a gain of long domains": Problem(
        [300] * 2, 130, is_equal=True, has_factor=True, has_statistics=True
    ),
    "a gain of long unequal domains": Problem(
        [301, 700, 0, 530], 130, has_factor=True, has_statistics=True
    ),
    "a gain of 16 bits": Problem(
        [64, 300], 17, has_factor=True, has_statistics=True, dtype=BFLOAT16, out_dtype=FLOAT32
    ),
    "a gain in float64": Problem(
        [64, 300], 17, has_factor=True, has_statistics=True, dtype=FLOAT64, out_dtype=FLOAT64
    ),
    "a gain without statistics": Problem([7, 90], 33, has_factor=True),
    "an embedding": Problem([0, 3, 1, 0, 9, 2, 0, 40], 16, rows=4, is_ordered=True),
    "a wide embedding": Problem([0, 3, 1, 40], 1100, rows=2, is_ordered=True),
    "an embedding of 16 bits": Problem(
        [0, 3, 16, 70], 16, rows=2, is_ordered=True, dtype=FLOAT16, out_dtype=FLOAT32
    ),
    "an embedding in float64": Problem(
        [5, 0, 91, 1], 24, is_ordered=True, dtype=FLOAT64, out_dtype=FLOAT64
    ),
    "an embedding of nothing": Problem([0, 0], 3, is_ordered=True),
    "one column": Problem([3, 4], 1),
    "float64 rounded to 16 bits": Problem([30, 4], 5, dtype=FLOAT64, out_dtype=BFLOAT16),
    "no tokens": Problem([0, 0], 3),
}


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_sums_are_the_reference(name, add, implementation, device):
    """With the same bits in the next call, and nothing beside them."""
    problem = PROBLEMS[name]
    values, terms, out = problem.values(device), problem.terms(device), problem.out(device)
    exact, sizes = exact_sums(problem, values, terms)
    if add:
        exact, sizes = exact + out.double(), sizes + out.double().abs()
    else:
        # What is overwritten is not read.
        out.fill_(math.nan)
    again = out._base.clone().as_strided(out.shape, out.stride())
    beside = out._base[:, problem.rows * problem.width :].clone()
    for each in (out, again):
        segment_sum(values, each, add=add, **terms, implementation=implementation)
    assert torch.equal(out._base, again._base)
    assert torch.equal(out._base[:, problem.rows * problem.width :], beside)
    # Float32 sums of at most 32 steps, a tree, and three roundings of a term; then the store's.
    is_double = FLOAT64 in (problem.dtype, problem.out_dtype)
    slack = 40 * torch.finfo(FLOAT64 if is_double else FLOAT32).eps
    stored = torch.finfo(out.dtype).eps
    if implementation == "triton" and is_interpreted():
        # The interpreter cuts bits off where it narrows, by less than one unit.
        stored *= 2
    assert ((out.double() - exact).abs() <= slack * sizes + stored * exact.abs()).all()


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if "gain" in name])
def test_a_bias_beside_a_gain_is_that_of_two_calls(name, add, implementation, device):
    """To the bit, in outputs whose groups lie at other distances."""
    problem = PROBLEMS[name]
    values, terms = problem.values(device), problem.terms(device)
    gain, bias = problem.out(device), problem.out(device)
    bias = torch.cat([bias, bias], 1)[:, : problem.rows]
    apart = gain.clone(), bias.clone()
    options = {"add": add, "implementation": implementation}
    segment_sum(values, gain, bias_GRD=bias, **terms, **options)
    segment_sum(values, apart[0], **terms, **options)
    segment_sum(values, apart[1], borders=terms.get("borders"), **options)
    assert torch.equal(gain, apart[0])
    assert torch.equal(bias, apart[1])


@pytest.mark.parametrize("lengths", [{"borders": [0, 0, 2, 2]}, {"segment_T": [1, 1]}], ids=str)
def test_a_row_without_tokens_is_left_alone_when_adding(lengths, implementation, device):
    out = torch.full((1, 3, 4), math.nan, device=device)
    out[0, 1] = 1
    segment_sum(
        torch.ones(2, 4, device=device),
        out,
        add=True,
        **{name: torch.tensor(numbers, device=device) for name, numbers in lengths.items()},
        implementation=implementation,
    )
    assert (out[0, 1] == 3).all()
    assert out[0, [0, 2]].isnan().all()


@pytest.mark.parametrize("name", ["a bias", "an embedding", "a gain of long unequal domains"])
def test_torch_knows_it(name, implementation, device):
    problem = PROBLEMS[name]
    terms, out = problem.terms(device), problem.out(device)
    names = ("borders", "segment_T", "order", "factor_TD", "mean_T", "rstd_T")
    bias = problem.out(device) if problem.has_factor else None
    arguments = (problem.values(device), out, True, *map(terms.get, names), bias)
    for changed in (out, out if bias is None else bias):
        assert_torch_knows("segment_sum", arguments, implementation, changed=changed)


def test_the_reference_by_hand():
    sums = reference.segment_sum(torch.arange(6.0)[:, None], [0, 2, 2, 6])
    assert sums.flatten().tolist() == [1, 0, 14]


def test_nothing_to_sum_into_is_no_error():
    for shape in ((2, 1, 0), (2, 0, 2)):
        out = torch.empty(shape)
        segment_sum(torch.randn(4, shape[2]), out, implementation="torch")
        assert out.shape == shape


def test_one_segment_may_have_an_odd_number_of_tokens(implementation, device):
    values_TD = torch.randn(3, 5, device=device)
    out_GRD = torch.full((1, 1, 5), math.nan, device=device)
    segment_sum(values_TD, out_GRD, implementation=implementation)
    torch.testing.assert_close(out_GRD[0, 0], values_TD.sum(0))
