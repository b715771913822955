"""Each operator on a problem: ours, what plain torch offers instead, the truth, bytes and flops.

What is measured against what is decided here and nowhere else, so that the ratio table and the GPU
script speak of the same things.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.problems import BLOCKS, MATRIX, Arena, OperatorProblem, coefficients, largest_model
from doge_fast import reference
from doge_fast.alternation import Call
from doge_fast.kernels import (
    accumulate,
    cross_entropy,
    gram,
    gram_and_sum,
    implementations,
    segment_sum,
    weighted_sum,
)
from doge_fast.kernels.dispatch import IMPLEMENTATIONS, OPERATORS
from doge_fast.weights.aligned import WAITING_STEPS, AlignedSettings, align
from doge_fast.weights.reweight import StepSettings, new_state, reweight
from doge_fast.weights.rule import Matrices, Names

# Relative to the largest entry, against float64: what the library promises.
GRAM_TOLERANCE = 1e-6
# Large enough that no column counts for more than all others.
METRIC_EPS = 1e-3
# Columns at both ends of a block that are compared with the truth; a tail is where mistakes are.
CHECKED_COLUMNS = 1 << 16
# Elements of one float64 product of the truth: a cache's worth, or enough to fill a GPU.
TRUTH_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
CHUNK_COLUMNS = 4096
# A separate product per pair of rows is no formulation beyond this.
MAX_ROWS_IN_PAIRS = 7
BIAS_COLUMNS = NORM_WIDTH = 768
# Of GPT-2: rows of logits begin at multiples of 16 all the same, as those of the losses do.
WORDS = 50_257
# Of the paper's steps.
STEP_TOKENS = 65_536


@dataclass
class Case:
    """One operator on one problem."""

    operator: str
    label: str
    """What is special about it: "add", "set", ..., or empty."""
    problem: OperatorProblem
    device: torch.device
    num_bytes: int
    """That must be moved: each input read once, each output written once."""
    flops: int
    error: Callable[[Call], float]
    """Run a formulation and compare what it did with float64."""
    tolerance: float
    yardsticks: dict[str, tuple[Call, int]] = field(default_factory=dict)
    """Plain reads or copies of the same memory, and the bytes that each moves."""
    ours: dict[str, Call] = field(default_factory=dict)
    """By implementation."""
    plain: dict[str, Call] = field(default_factory=dict)
    """By formulation in plain torch."""
    widening_flops: int = 0
    """Spent on top where an element is widened before it is multiplied: an instruction each."""
    is_small: bool = False
    """Too small for bandwidth to mean anything: what counts is the price of a call."""

    def __str__(self) -> str:
        label = f" {self.label}" if self.label else ""
        return f"{self.operator}{label} {self.problem}"


def timed_implementations(device: torch.device | str, *, with_torch: bool = False) -> list[str]:
    """Those whose time on the device means something; the fallback only where it is asked for."""
    device = torch.device(device)
    reasons = implementations(device)
    # On a CPU Triton runs in its interpreter.
    wanted = ("cpp",) if device.type == "cpu" else ("triton", "cuda")
    found = [name for name in IMPLEMENTATIONS if name in wanted and reasons[name] is None]
    return [*found, "torch"] if with_torch or not found else found


def gram_case(arena: Arena, problem: OperatorProblem, names: Sequence[str]) -> Case:
    """All inner products of the rows."""
    blocks = arena.blocks(problem)
    operand = blocks[0] if problem.shape == MATRIX else blocks
    num_rows, num_columns = problem.num_rows, problem.num_columns
    truth = functools.cache(lambda: gram_truth(blocks))

    def error(call: Call) -> float:
        found_KK = call()
        assert isinstance(found_KK, Tensor)
        return relative_error([found_KK], [truth()])

    return Case(
        operator="gram",
        label="",
        problem=problem,
        device=arena.device,
        num_bytes=problem.num_bytes,
        flops=num_rows * (num_rows + 1) * num_columns,
        widening_flops=2 * num_rows * num_columns,
        error=error,
        tolerance=GRAM_TOLERANCE,
        yardsticks=_reads(arena, problem) if arena.device.type == "cpu" else _copies(arena),
        ours={name: functools.partial(gram, operand, implementation=name) for name in names},
        plain=_plain_grams(blocks),
    )


def metric_case(arena: Arena, problem: OperatorProblem, names: Sequence[str]) -> Case:
    """All inner products of the rows in the metric of second moments, of the dtype of the rows."""
    case = gram_case(arena, problem, names)
    blocks = arena.blocks(problem)
    moments = arena.outputs(problem.sizes)
    num_rows, num_columns = problem.num_rows, problem.num_columns
    truth = functools.cache(lambda: metric_truth(blocks, moments))

    def error(call: Call) -> float:
        # Yardsticks write there.
        for block, v in zip(blocks, moments, strict=True):
            torch.square(block[0], out=v)
        found_KK = call()
        assert isinstance(found_KK, Tensor)
        return relative_error([found_KK], [truth()])

    def products() -> Tensor:
        total_KK = blocks[0].new_zeros(num_rows, num_rows)
        for block, v in zip(blocks, moments, strict=True):
            metric = torch.where(v == 0, 0, 1 / (v.sqrt() + METRIC_EPS))
            total_KK.addmm_(block * metric, block.T)
        return total_KK

    case.label, case.error, case.plain = "metric", error, {"x * d, mm": products}
    case.num_bytes += num_columns * problem.dtype.itemsize
    # A product with the root of the metric for each element.
    case.flops += num_rows * num_columns
    case.ours = {
        name: functools.partial(
            *(gram, blocks), second_moments=moments, eps=METRIC_EPS, implementation=name
        )
        for name in names
    }
    return case


def halves_case(arena: Arena, problem: OperatorProblem, names: Sequence[str]) -> Case:
    """The same of sums of two rows, and the product of these two; an odd row is left out."""
    case = metric_case(arena, problem, names)
    blocks = [block[: problem.num_rows // 2 * 2] for block in arena.blocks(problem)]
    moments = arena.outputs(problem.sizes)
    num_rows, num_columns = len(blocks[0]), problem.num_columns
    truth = functools.cache(lambda: halves_truth(metric_truth(blocks, moments)))

    def error(call: Call) -> float:
        # Yardsticks write there.
        for block, v in zip(blocks, moments, strict=True):
            torch.square(block[0], out=v)
        found = call()
        assert isinstance(found, Tensor)
        return relative_error([found], [truth()])

    def products() -> Tensor:
        total = blocks[0].new_zeros(num_rows // 2 + 1, num_rows // 2)
        for block, v in zip(blocks, moments, strict=True):
            metric = torch.where(v == 0, 0, 1 / (v.sqrt() + METRIC_EPS))
            scaled = block[0::2] * metric
            total[-1] += (scaled * block[1::2]).sum(1)
            scaled += block[1::2] * metric
            total[:-1].addmm_(scaled, (block[0::2] + block[1::2]).T)
        return total

    case.label, case.error, case.plain = "halves", error, {"(x + y) * d, mm": products}
    case.num_bytes = (num_rows + 1) * num_columns * problem.dtype.itemsize
    # For each half a product with the root of the metric; for two a sum and their product.
    num_sums = num_rows // 2
    case.flops = (num_sums * (num_sums + 1) + 2 * num_rows + num_sums) * num_columns
    case.ours = {
        name: functools.partial(
            *(gram, blocks),
            second_moments=moments,
            eps=METRIC_EPS,
            halves=True,
            implementation=name,
        )
        for name in names
    }
    return case


def weighted_sum_case(arena: Arena, problem: OperatorProblem, names: Sequence[str]) -> Case:
    """The combined gradient."""
    blocks = arena.blocks(problem)
    outs = arena.outputs(problem.sizes)
    c_K = coefficients(problem.num_rows, arena.device)

    def error(call: Call) -> float:
        for out in outs:
            out.fill_(math.nan)
        call()
        pairs = [
            (_ends(out), _ends(block).double().T @ c_K)
            for block, out in zip(blocks, outs, strict=True)
        ]
        return relative_error([found for found, _ in pairs], [exact for _, exact in pairs])

    return Case(
        operator="weighted_sum",
        label="",
        problem=problem,
        device=arena.device,
        num_bytes=problem.num_bytes + problem.num_columns * problem.dtype.itemsize,
        flops=2 * problem.num_rows * problem.num_columns,
        error=error,
        tolerance=_sum_tolerance(problem),
        yardsticks=_copies(arena),
        ours={
            name: functools.partial(weighted_sum, blocks, c_K, out=outs, implementation=name)
            for name in names
        },
        plain=_plain_sums(blocks, c_K, outs),
    )


def gram_and_sum_case(arena: Arena, problem: OperatorProblem, names: Sequence[str]) -> Case:
    """`halves_case`, and the combined gradient of the same sums."""
    case = halves_case(arena, problem, names)
    blocks = [block[: problem.num_rows // 2 * 2] for block in arena.blocks(problem)]
    moments = arena.outputs(problem.sizes)
    outs = [torch.zeros_like(v) for v in moments]
    num_sums = problem.num_rows // 2
    c_K = coefficients(num_sums, arena.device)
    c_R = c_K.repeat_interleave(2)
    gram_error, (products,) = case.error, case.plain.values()
    sums = _plain_sums(blocks, c_R, outs)["a @ x"]

    def error(call: Call) -> float:
        for out in outs:
            out.fill_(math.nan)
        of_gram = gram_error(call)
        pairs = [
            (_ends(out), _ends(block).double().T @ c_R)
            for block, out in zip(blocks, outs, strict=True)
        ]
        of_sum = relative_error([found for found, _ in pairs], [exact for _, exact in pairs])
        # As large as the other where both are as large as they may be.
        return largest([of_gram, of_sum * GRAM_TOLERANCE / _sum_tolerance(problem)])

    def plain() -> object:
        sums()
        return products()

    case.operator, case.label, case.error = "gram_and_sum", "halves", error
    case.plain = {"(x + y) * d, mm, mv": plain}
    case.num_bytes += problem.num_columns * problem.dtype.itemsize
    case.flops += 3 * num_sums * problem.num_columns
    case.ours = {
        name: functools.partial(
            *(gram_and_sum, blocks, c_K),
            out=outs,
            second_moments=moments,
            eps=METRIC_EPS,
            halves=True,
            implementation=name,
        )
        for name in names
    }
    return case


def accumulate_case(
    arena: Arena, names: Sequence[str], *, add: bool, row_dtype: torch.dtype | None = None
) -> Case:
    """Gradients of one domain into their rows."""
    row_dtype = row_dtype or arena.dtype
    memory = arena.scratch.view(row_dtype)
    sizes = tuple(largest_model(len(memory)))
    problem = OperatorProblem(1, arena.dtype, BLOCKS, sizes)
    grads = arena.gradients(sizes)
    rows = arena.outputs(sizes) if row_dtype == arena.dtype else _cut_rows(memory, sizes)
    passes = arena.dtype.itemsize + row_dtype.itemsize * (2 if add else 1)

    def error(call: Call) -> float:
        for row in rows:
            row.fill_(1.0 if add else math.nan)
        call()
        exact = [_ends(grad).double() + (1.0 if add else 0.0) for grad in grads]
        found = relative_error([_ends(row) for row in rows], exact)
        # Repeated additions must not leave the range of the dtype.
        for row in rows:
            row.zero_()
        return found

    dtypes = "" if row_dtype == arena.dtype else f" to {row_dtype}".replace("torch.", "")
    return Case(
        operator="accumulate",
        label=("add" if add else "set") + dtypes,
        problem=problem,
        device=arena.device,
        num_bytes=problem.num_columns * passes,
        flops=problem.num_columns if add else 0,
        error=error,
        tolerance=float(torch.finfo(row_dtype).eps),
        yardsticks=_copies(arena),
        ours={
            name: functools.partial(accumulate, grads, rows, add=add, implementation=name)
            for name in names
            if name in OPERATORS["accumulate"].implementations
        },
        plain=_plain_accumulations(grads, rows, add=add),
    )


def reweight_case(num_rows: int, device: torch.device | str, names: Sequence[str]) -> Case:
    """The K x K step, in those of `names` that it is written in."""
    device = torch.device(device)
    names = [name for name in names if name in OPERATORS["reweight"].implementations]
    generator = torch.Generator().manual_seed(0)
    grads_KN = torch.randn(num_rows, 64, dtype=torch.float64, generator=generator)
    alpha_K = torch.full((num_rows,), 1 / num_rows, dtype=torch.float64)
    tau_K = torch.ones(num_rows, dtype=torch.float64)
    exact_K, _, exact_gain_K = reference.step(grads_KN, alpha_K, tau_R=tau_K, lr=1e-4, mu=0.01)
    start_S = new_state(alpha_K).to(device)
    state_S = start_S.clone()
    arguments = {
        "tau_R": tau_K.to(device),
        "row_R": torch.arange(num_rows, dtype=torch.int32, device=device),
        "settings_F": torch.tensor(
            StepSettings(lr=1e-4, mu=0.01, max_grad_norm=1.0), dtype=torch.float64, device=device
        ),
    }
    gram_KK = (grads_KN @ grads_KN.T).to(device)

    def error(call: Call) -> float:
        state_S.copy_(start_S)
        step = call()
        pairs = [(step.alpha, exact_K), (step.gain, exact_gain_K)]  # type: ignore[attr-defined]
        return largest(relative_error([found], [exact.to(device)]) for found, exact in pairs)

    problem = OperatorProblem(num_rows, torch.float64, MATRIX, (num_rows,))
    runs = {
        name: functools.partial(
            reweight, gram_KK, gram_KK, state_S, implementation=name, **arguments
        )
        for name in {*names, "torch"}
    }
    return Case(
        operator="reweight",
        label="",
        problem=problem,
        device=device,
        num_bytes=(2 * num_rows * num_rows + 10 * num_rows) * 8,
        flops=6 * num_rows * num_rows,
        error=error,
        tolerance=1e-12,
        ours={name: runs[name] for name in names},
        plain={"small operators": runs["torch"]},
        is_small=True,
    )


def align_case(num_rows: int, device: torch.device | str, names: Sequence[str]) -> Case:
    """The aligned rule's step on halves, in those of `names` that it is written in."""
    device = torch.device(device)
    names = [name for name in names if name in OPERATORS["align"].implementations]
    generator = torch.Generator().manual_seed(0)
    halves_2KN = torch.randn(2, num_rows, 64, dtype=torch.float64, generator=generator)
    halves_2KN += torch.randn(64, dtype=torch.float64, generator=generator)
    alpha_K = torch.full((num_rows,), 1 / num_rows, dtype=torch.float64)
    ones_K, zeros_KK = torch.ones_like(alpha_K), alpha_K.new_zeros(num_rows, num_rows)
    tau_K = ones_K / torch.arange(1, num_rows + 1)
    exact_K, _, exact_KK = reference.aligned_step(
        *(halves_2KN, alpha_K, zeros_KK, WAITING_STEPS),
        tau_R=tau_K,
        first_R=ones_K / 2,
        metric_N=ones_K.new_ones(64),
    )
    start_S, mean_KK = new_state(alpha_K).to(device), zeros_KK.to(device)
    mixture_K = alpha_K.to(device)
    start_S[-2] = WAITING_STEPS
    state_S = start_S.clone()
    products_1K = halves_2KN.prod(0).sum(1)[None]
    matrix = torch.cat([reference.gram(halves_2KN.sum(0)), products_1K]).to(device)
    of_names = Names(
        tau_K.to(device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        (ones_K / 2).to(device),
    )
    settings_F = torch.tensor(AlignedSettings(1.0, 0.0), dtype=torch.float64, device=device)

    def error(call: Call) -> float:
        state_S.copy_(start_S)
        mean_KK.zero_()
        alpha = call().alpha  # type: ignore[attr-defined]
        pairs = [(alpha, exact_K), (mean_KK, exact_KK)]
        return largest(relative_error([found], [exact.to(device)]) for found, exact in pairs)

    runs = {
        name: functools.partial(
            align,
            *(Matrices(matrix, matrix), state_S, mean_KK, mixture_K, of_names, settings_F),
            implementation=name,
        )
        for name in {*names, "torch"}
    }
    return Case(
        operator="align",
        label="",
        problem=OperatorProblem(num_rows, torch.float64, MATRIX, (num_rows,)),
        device=device,
        # The products and the mean are read, the mean and the record's matrix written.
        num_bytes=8 * 4 * num_rows * num_rows,
        flops=9 * num_rows * num_rows,
        error=error,
        tolerance=1e-12,
        ours={name: runs[name] for name in names},
        plain={"small operators": runs["torch"]},
        is_small=True,
    )


def segment_sum_case(arena: Arena, num_rows: int, names: Sequence[str]) -> Case:
    """Gains of a LayerNorm, of domains with equally many tokens; in those it is written in."""
    num_tokens = min(STEP_TOKENS, len(arena.values) // (2 * NORM_WIDTH)) // num_rows * num_rows
    sizes = (num_tokens * NORM_WIDTH,) * 2
    values_TD, inputs_TD = (each.view(-1, NORM_WIDTH) for each in arena.gradients(sizes))
    statistics = {
        "mean_T": torch.zeros(num_tokens, device=arena.device),
        "rstd_T": torch.ones(num_tokens, device=arena.device),
    }
    # Rows of float32, as a flat buffer has them where a model is autocast.
    out_KD = torch.empty(num_rows, 1, NORM_WIDTH, device=arena.device)
    if arena.dtype == torch.float64:
        out_KD = out_KD.double()

    def error(call: Call) -> float:
        out_KD.fill_(math.nan)
        call()
        terms_TD = values_TD.double() * inputs_TD.double()
        exact_KD = terms_TD.view(num_rows, -1, NORM_WIDTH).sum(1, keepdim=True)
        return relative_error([out_KD], [exact_KD])

    def products() -> None:
        dtype = out_KD.dtype
        terms_TD = values_TD.to(dtype) * inputs_TD.to(dtype)
        torch.sum(terms_TD.view(num_rows, -1, NORM_WIDTH), 1, keepdim=True, out=out_KD)

    problem = OperatorProblem(num_rows, arena.dtype, MATRIX, (num_tokens // num_rows * NORM_WIDTH,))
    return Case(
        operator="segment_sum",
        label="gain",
        problem=problem,
        device=arena.device,
        num_bytes=2 * problem.num_bytes + 8 * num_tokens + out_KD.nbytes,
        flops=4 * num_tokens * NORM_WIDTH,
        error=error,
        # Terms of both signs: a sum is about the root of their number, which it loses units of.
        tolerance=1e-12 if arena.dtype == torch.float64 else 1e-5,
        yardsticks=_copies(arena),
        ours={
            name: functools.partial(
                *(segment_sum, values_TD, out_KD),
                factor_TD=inputs_TD,
                implementation=name,
                **statistics,
            )
            for name in names
            if name in OPERATORS["segment_sum"].implementations
        },
        plain={"products, sum": products},
    )


def cross_entropy_case(arena: Arena, names: Sequence[str]) -> Case:
    """Logits to their gradients, in place; in those of `names` that it is written in."""
    num_words = min(WORDS, len(arena.values) // 8)
    stride = -(-num_words // 16) * 16
    num_tokens = min(STEP_TOKENS, len(arena.values) // stride)
    logits_TV = arena.values[: num_tokens * stride].view(-1, stride)[:, :num_words]
    # It is overwritten again and again.
    before_TV = logits_TV.clone()
    generator = torch.Generator(arena.device).manual_seed(0)
    targets_T = torch.randint(num_words, (num_tokens,), generator=generator, device=arena.device)
    dtype = torch.promote_types(arena.dtype, torch.float32)
    shares_T = torch.full((num_tokens,), 1.0, dtype=dtype, device=arena.device)

    def passes() -> Tensor:
        losses_T = torch.nn.functional.cross_entropy(
            logits_TV.to(dtype), targets_T, reduction="none"
        )
        slope_TV = logits_TV.to(dtype).softmax(1)
        slope_TV.scatter_add_(1, targets_T[:, None], -shares_T[:, None])
        logits_TV.copy_(slope_TV)
        return losses_T

    def error(call: Call) -> float:
        logits_TV.copy_(before_TV)
        losses_T = call()
        assert isinstance(losses_T, Tensor)
        few = slice(0, 64)
        exact_TV = before_TV[few].double().softmax(1)
        exact_T = -exact_TV.gather(1, targets_T[few, None])[:, 0].log()
        exact_TV.scatter_add_(1, targets_T[few, None], -shares_T[few, None].double())
        return relative_error([logits_TV[few], losses_T[few]], [exact_TV, exact_T])

    problem = OperatorProblem(1, arena.dtype, MATRIX, (num_tokens * num_words,))
    return Case(
        operator="cross_entropy",
        label="",
        problem=problem,
        device=arena.device,
        # Twice read, once written.
        num_bytes=3 * problem.num_bytes,
        flops=0,
        error=error,
        # Gradients are at most 1, and losses at least that.
        tolerance=_sum_tolerance(problem) if dtype == torch.float32 else 1e-12,
        yardsticks=_copies(arena),
        ours={
            name: functools.partial(
                cross_entropy, logits_TV, targets_T, shares_T, implementation=name
            )
            for name in names
            if name in OPERATORS["cross_entropy"].implementations
        },
        plain={"softmax, scatter": passes},
    )


def bias_cases(arena: Arena, names: Sequence[str]) -> Iterator[Case]:
    """One bias of seven domains: nothing but the price of a call."""
    problem = OperatorProblem(7, arena.dtype, MATRIX, (BIAS_COLUMNS,))
    for make in (gram_case, weighted_sum_case):
        case = make(arena, problem, names)
        case.is_small, case.label, case.yardsticks = True, "bias", {}
        yield case


def gram_truth(blocks: Sequence[Tensor]) -> Tensor:
    """[K, K], everything in float64, a piece at a time."""
    num_rows, device = len(blocks[0]), blocks[0].device
    columns = TRUTH_ELEMENTS.get(device.type, 1 << 20) // num_rows
    total_KK = torch.zeros(num_rows, num_rows, dtype=torch.float64, device=device)
    for block in blocks:
        for piece in block.split(columns, dim=1):
            total_KK += reference.gram(piece.double())
    return total_KK


def metric_truth(blocks: Sequence[Tensor], moments: Sequence[Tensor]) -> Tensor:
    """[K, K] in the metric, everything in float64, a piece at a time."""
    num_rows, device = len(blocks[0]), blocks[0].device
    columns = TRUTH_ELEMENTS.get(device.type, 1 << 20) // num_rows
    total_KK = torch.zeros(num_rows, num_rows, dtype=torch.float64, device=device)
    for block, v in zip(blocks, moments, strict=True):
        for piece, of_piece in zip(block.split(columns, dim=1), v.split(columns), strict=True):
            # As in the operator, d is 0 where v is.
            root = torch.where(of_piece == 0, 0, (of_piece.double().sqrt() + METRIC_EPS).rsqrt())
            total_KK += reference.gram(piece.double() * root)
    return total_KK


def halves_truth(gram_CC: Tensor) -> Tensor:
    """[K + 1, K] of the Gram matrix of halves: that of their sums, and the products of two."""
    halves_K2K2 = gram_CC.unflatten(0, (-1, 2)).unflatten(2, (-1, 2))
    products_1K = halves_K2K2[:, 0, :, 1].diagonal()[None]
    return torch.cat([halves_K2K2.sum((1, 3)), products_1K])


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest difference over the largest exact entry; infinite where anything is not a number."""
    pairs = zip(found, exact, strict=True)
    worst = largest(float((a.double() - b).abs().max()) for a, b in pairs)
    return worst / max(float(each.abs().max()) for each in exact)


def largest(errors: Iterable[float]) -> float:
    """Of errors; infinite where one is not a number, which `max` loses unless it comes first."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _sum_tolerance(problem: OperatorProblem) -> float:
    # One rounding to the output's dtype; float32 sums of K terms below that.
    unit = float(torch.finfo(problem.dtype).eps) / 2
    return unit + problem.num_rows * 6e-8 if problem.dtype != torch.float64 else 1e-14


def _ends(values: Tensor) -> Tensor:
    """The first and the last columns of [..., N]."""
    if values.shape[-1] <= 2 * CHECKED_COLUMNS:
        return values
    return torch.cat([values[..., :CHECKED_COLUMNS], values[..., -CHECKED_COLUMNS:]], dim=-1)


def _reads(arena: Arena, problem: OperatorProblem) -> dict[str, tuple[Call, int]]:
    """Formulations of reading the rows' memory once; the fastest is the yardstick."""
    count = problem.num_rows * problem.num_columns
    values = arena.values[:count]
    # Bits of a narrower type read as float32 are numbers too, and nothing is converted.
    if values.dtype.itemsize == 2:
        values = values[: count // 2 * 2].view(torch.float32)
    num_bytes = values.nbytes
    found: dict[str, tuple[Call, int]] = {"torch.sum": (values.sum, num_bytes)}
    if implementations(arena.device)["cpp"] is None:
        one_row = functools.partial(gram, values[None], implementation="cpp")
        found["norm of one row"] = (one_row, num_bytes)
    return found


def _copies(arena: Arena) -> dict[str, tuple[Call, int]]:
    source = arena.values[: len(arena.scratch)]
    copy = functools.partial(arena.scratch.copy_, source)
    return {"copy_": (copy, 2 * arena.scratch.nbytes)}


def _cut_rows(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    firsts = itertools.accumulate(sizes, initial=0)
    return [memory[first : first + size] for first, size in zip(firsts, sizes, strict=False)]


def _plain_grams(blocks: list[Tensor]) -> dict[str, Call]:
    if len(blocks) > 1:
        return {
            "mm of each block": lambda: _sum_of_products(blocks),
            "cat, mm": lambda: _product(torch.cat(blocks, dim=1)),
            "cat, chunked bmm": lambda: _chunked(torch.cat(blocks, dim=1)),
        }
    x_KN = blocks[0]
    found: dict[str, Call] = {
        "mm(x, x.T)": lambda: _product(x_KN),
        "chunked bmm": lambda: _chunked(x_KN),
    }
    if x_KN.dtype.itemsize == 2:
        found["x.float(), mm"] = lambda: _product(x_KN.float())
    if len(x_KN) <= MAX_ROWS_IN_PAIRS:
        found["dot of each pair"] = lambda: _pairs_of_rows(x_KN)
    return found


def _product(x_KN: Tensor) -> Tensor:
    return torch.mm(x_KN, x_KN.T)


def _sum_of_products(blocks: Sequence[Tensor]) -> Tensor:
    total_KK = blocks[0].new_zeros(len(blocks[0]), len(blocks[0]))
    for block in blocks:
        total_KK.addmm_(block, block.T)
    return total_KK


def _chunked(x_KN: Tensor) -> Tensor:
    num_rows = len(x_KN)
    whole = x_KN.shape[1] // CHUNK_COLUMNS * CHUNK_COLUMNS
    rest = x_KN[:, whole:]
    total_KK = (rest @ rest.T).double()
    if whole:
        chunks_CKB = x_KN[:, :whole].unflatten(1, (-1, CHUNK_COLUMNS)).transpose(0, 1)
        # In groups, or the partial results of many rows outgrow the rows.
        for group in chunks_CKB.split(max(1, (1 << 24) // num_rows**2)):
            total_KK += torch.bmm(group, group.mT).sum(0, dtype=torch.float64)
    return total_KK


def _pairs_of_rows(x_KN: Tensor) -> Tensor:
    num_rows = len(x_KN)
    total_KK = x_KN.new_empty(num_rows, num_rows)
    for i in range(num_rows):
        for j in range(i + 1):
            total_KK[i, j] = total_KK[j, i] = torch.dot(x_KN[i], x_KN[j])
    return total_KK


def _plain_sums(blocks: list[Tensor], c_K: Tensor, outs: list[Tensor]) -> dict[str, Call]:
    a_K = c_K.to(blocks[0].dtype)
    numbers = c_K.tolist()
    rows = [[block[k] for block in blocks] for k in range(len(numbers))]

    def products() -> None:
        for block, out in zip(blocks, outs, strict=True):
            torch.mv(block.T, a_K, out=out)

    def foreach() -> None:
        torch._foreach_copy_(outs, rows[0])
        torch._foreach_mul_(outs, numbers[0])
        for row, number in zip(rows[1:], numbers[1:], strict=True):
            torch._foreach_add_(outs, row, alpha=number)

    return {"a @ x": products, "foreach mul, add": foreach}


def _plain_accumulations(grads: list[Tensor], rows: list[Tensor], *, add: bool) -> dict[str, Call]:
    def loop() -> None:
        for grad, row in zip(grads, rows, strict=True):
            row.add_(grad) if add else row.copy_(grad)

    def foreach() -> None:
        torch._foreach_add_(rows, grads) if add else torch._foreach_copy_(rows, grads)

    return {"foreach": foreach, "loop": loop}
