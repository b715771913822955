"""Whether the operators are right on a device: rows that say `correct`, or why they do not."""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import cases, operators, steps
from benchmarks.gpu.session import Row, Session
from benchmarks.problems import BLOCKS, MATRIX, OperatorProblem, coefficients
from doge_fast import reference
from doge_fast.kernels import accumulate, gram, scale_rows, segment_sum, weighted_sum
from doge_fast.kernels.dispatch import OPERATORS

# The usual number first. 13 and 14 lie where pairs of rows end and tiles begin.
NUM_ROWS = (7, 22, 50, 2, 128, 13, 14)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the sum of sizes: a hundred additions in float32, each off by at most 2**-24 of what it has.
SEGMENT_TOLERANCE = 2.0**-17
# A matrix whose last row begins beyond 2**31 elements.
HUGE_ROWS, HUGE_COLUMNS = 3, (1 << 30) + 1


def correctness(session: Session) -> Iterator[Row]:
    """Every operator, implementation, dtype and K against float64; odd sizes, and one sign.

    `quick` is small enough for compute-sanitizer.
    """
    columns = 10_007 if session.quick else 1_000_003
    blocks = (1, 3, 65, 4_097, 64, columns // 8, 768)
    dtypes = DTYPES[:2] if session.quick else DTYPES
    for num_rows in NUM_ROWS:
        for make in (cases.reweight_case, cases.align_case):
            case = make(num_rows, session.device, session.names)
            for name in case.ours:
                yield checked(case, name)
        for dtype in dtypes:
            for sizes, shape in (((columns,), MATRIX), (blocks, BLOCKS)):
                problem = OperatorProblem(num_rows, dtype, shape, sizes)
                arena = Rows(problem, session.device, one_sign=shape == MATRIX)
                for name in session.names:
                    yield checked(cases.gram_case(arena, problem, [name]), name)
                    yield checked(cases.metric_case(arena, problem, [name]), name)
                    yield checked(cases.halves_case(arena, problem, [name]), name)
                    yield checked(cases.weighted_sum_case(arena, problem, [name]), name)
                    yield checked(cases.gram_and_sum_case(arena, problem, [name]), name)
    for dtype in dtypes:
        problem = OperatorProblem(2, dtype, BLOCKS, blocks)
        arena = Rows(problem, session.device)
        for add in (False, True):
            case = cases.accumulate_case(arena, session.names, add=add)
            for name in case.ours:
                yield checked(case, name)
        for name in session.names:
            yield from head(arena, name)
    # Summed by one program for each segment, and by several that share it.
    lengths = (70, 600 if session.quick else 9_001)
    for dtype, name, length in itertools.product(dtypes[:2], session.names, lengths):
        yield from segment_sums(session.device, name, dtype, length)


def head(arena: cases.Arena, name: str) -> Iterator[Row]:
    """Logits to their gradients, and rows times factors of which one is 1."""
    if name not in OPERATORS["cross_entropy"].implementations:
        return
    yield checked(cases.cross_entropy_case(arena, [name]), name)
    values_RN = arena.values[: 3 * 70_001 if len(arena.values) > 3 * 70_001 else 3].view(3, -1)
    factors_R = torch.tensor([2.0, 1.0, 0.0], device=arena.device)
    exact_RN = values_RN.double() * factors_R.double()[:, None]
    scale_rows(values_RN, factors_R, implementation=name)
    row: Row = {"operator": "scale_rows", "implementation": name, "rows": 3}
    row |= {"dtype": str(arena.dtype).removeprefix("torch."), "columns": values_RN.shape[1]}
    yield row | {"correct": torch.equal(values_RN.double(), exact_RN)}


def segment_sums(device: torch.device, name: str, dtype: torch.dtype, length: int) -> Iterator[Row]:
    """Gains, biases, embeddings of seven domains of about `length` tokens, and one without any."""
    if name not in OPERATORS["segment_sum"].implementations:
        return
    generator = torch.Generator().manual_seed(0)
    lengths = [length, length // 2 + 1, 0, 7, length, 1, length - 3]
    borders = list(itertools.accumulate(lengths, initial=0))
    num_tokens, width = borders[-1], 130

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    values_TD, factor_TD = draw(num_tokens, width), draw(num_tokens, width)
    order_T = torch.randperm(num_tokens, generator=generator).to(device)
    mean_T = factor_TD.float().mean(1)
    rstd_T = factor_TD.float().var(1).rsqrt()
    normal_TD = (factor_TD.double() - mean_T.double()[:, None]) * rstd_T.double()[:, None]
    wide_TD = values_TD.double()
    terms = {"gain": wide_TD * normal_TD, "bias": wide_TD, "embedding": wide_TD[order_T]}
    empty_GRD = torch.full((len(lengths), 1, width), math.nan, device=device)
    outs = {kind: empty_GRD.clone() for kind in terms}
    of_gain: Row = {"factor_TD": factor_TD, "mean_T": mean_T, "rstd_T": rstd_T}
    of_gain |= {"borders": torch.tensor(borders, device=device), "bias_GRD": outs["bias"]}
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    of_embedding: Row = {"segment_T": segments.to(device), "order": order_T}
    segment_sum(values_TD, outs["gain"], **of_gain, implementation=name)
    segment_sum(values_TD, outs["embedding"], **of_embedding, implementation=name)
    for kind, terms_TD in terms.items():
        exact_SD = reference.segment_sum(terms_TD, borders)
        sizes_SD = reference.segment_sum(terms_TD.abs(), borders)
        error = (outs[kind][:, 0].double() - exact_SD).abs().nan_to_num(math.inf)
        row: Row = {"operator": f"segment_sum {kind}", "implementation": name, "rows": 7}
        row |= {"dtype": str(dtype).removeprefix("torch."), "columns": num_tokens * width}
        row["error"] = float((error / sizes_SD.clamp(min=1e-30)).max())
        row["correct"] = bool((error <= SEGMENT_TOLERANCE * sizes_SD).all())
        yield (
            row if row["correct"] else row | {"problem": f"off by {row['error']:.1e} of the sizes"}
        )


def determinism(session: Session) -> Iterator[Row]:
    """The same call three times: the same bits."""
    columns = 10_007 if session.quick else 4_000_037
    for dtype in DTYPES:
        for num_rows in (7, 50):
            problem = OperatorProblem(num_rows, dtype, MATRIX, (columns,))
            (rows_KN,) = Rows(problem, session.device).blocks(problem)
            c_K = coefficients(num_rows, session.device)
            runs: dict[str, Callable[[str], Tensor]] = {
                "gram": lambda name, x=rows_KN: gram(x, implementation=name),
                "weighted_sum": lambda name, x=rows_KN, c=c_K: weighted_sum(  # type: ignore[misc]
                    x, c, implementation=name
                ),
            }
            for operator, run in runs.items():
                for name in session.names:
                    results = [run(name).clone() for _ in range(3)]
                    yield {
                        "operator": operator,
                        "implementation": name,
                        "dtype": problem.dtype_name,
                        "rows": num_rows,
                        "correct": all(torch.equal(results[0], each) for each in results[1:]),
                    }


def offsets(session: Session) -> Iterator[Row]:
    """More elements than 32 bits count: the last row must be read where it is."""
    columns = 100_003 if session.quick else HUGE_COLUMNS
    problem = OperatorProblem(HUGE_ROWS, torch.bfloat16, MATRIX, (columns,))
    if session.on_gpu and session.free_bytes() < 2.5 * problem.num_bytes:
        yield {"operator": "gram", "skipped": f"needs {2.5 * problem.num_bytes / 1e9:.0f} GB"}
        return
    arena = Rows(problem, session.device)
    for name in session.names:
        yield checked(cases.gram_case(arena, problem, [name]), name)
        yield checked(cases.weighted_sum_case(arena, problem, [name]), name)
    (rows_KN,) = arena.blocks(problem)
    # All rows as one gradient, onto itself: what is there is what must be there.
    whole = rows_KN.reshape(-1)
    halves = whole.chunk(2)
    for name in filter(OPERATORS["accumulate"].implementations.__contains__, session.names):
        arena.scratch.fill_(math.nan)
        out = arena.scratch[: len(halves[0])]
        accumulate([halves[0]], [out], add=False, implementation=name)
        yield {
            "operator": "accumulate",
            "implementation": name,
            "dtype": "bfloat16",
            "rows": 1,
            "columns": len(halves[0]),
            "correct": torch.equal(out, halves[0]),
        }


def graphs(session: Session) -> Iterator[Row]:
    """A whole step in a CUDA graph does what it does outside of one, on each GPU.

    Of several all but one are not the one in use, which a missing device guard would take.
    """
    if not session.on_gpu:
        yield {"skipped": "CUDA graphs need a GPU"}
        return
    for index in range(torch.cuda.device_count()):
        difference = steps.captured_step_error(torch.device("cuda", index))
        yield {"largest_difference": difference, "correct": difference == 0.0}


class Rows(cases.Arena):
    """The memory of one problem: random, of both signs or of one."""

    def __init__(
        self, problem: OperatorProblem, device: torch.device, *, one_sign: bool = False
    ) -> None:
        self.dtype, self.device = problem.dtype, device
        self._count = sum(self._stride(size) for size in problem.sizes)
        if problem.shape == MATRIX:
            self._count = problem.num_columns
        generator = torch.Generator(device).manual_seed(0)
        self.values = torch.empty(
            problem.num_rows * self._count, dtype=problem.dtype, device=device
        )
        self.values.normal_(generator=generator)
        if one_sign:
            self.values.abs_()
        self.scratch = torch.zeros(len(self.values) // 2 + 1, dtype=problem.dtype, device=device)


def checked(case: cases.Case, name: str) -> Row:
    """One check, as a row that says what went wrong."""
    row: Row = {
        "operator": case.operator,
        "implementation": name,
        "dtype": case.problem.dtype_name,
        "rows": case.problem.num_rows,
        "columns": case.problem.num_columns,
        "shape": case.problem.shape,
        "tolerance": case.tolerance,
    }
    return row | operators.checked(case, case.ours[name])
