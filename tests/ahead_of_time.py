"""Compiles the Triton kernels for GPUs that need not be there; prints what came out, as JSON.

Run as a program without TRITON_INTERPRET, which would leave nothing to compile:

    python -m tests.ahead_of_time PART PARTS
    python -m tests.ahead_of_time spills

takes every PARTS-th compilation, from PART on; or those that need the most registers, for all GPUs.
Another version of Triton, from `pip install --no-deps --target FOLDER`, goes first in PYTHONPATH.
"""

import importlib
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from doge_fast.kernels.schema import sum_dtype
from doge_fast.kernels.triton_support import decorate, triton_dtype
from doge_fast.weights.scores import PAPER, PUBLISHED
from tests.processes import printed_by

# The files of the operators; in their packages the same names are functions.
gram, segment_sum, weighted_sum, cross_entropy, scale_rows, reweight, aligned = FILES = [
    importlib.import_module(f"doge_fast.{name}")
    for name in (
        *("kernels.gram", "kernels.segment_sum", "kernels.weighted_sum", "kernels.cross_entropy"),
        *("kernels.scale_rows", "weights.reweight", "weights.aligned"),
    )
]
for _file in FILES:
    decorate(vars(_file))

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Compute capabilities: A100, and H100 or H200.
ARCHITECTURES = (80, 90)
# Of a block. For sm_86, sm_89 and sm_120, which have the least, code is as for sm_80.
SHARED_BYTES = {80: 101_376, 90: 232_448}
POINTERS = {
    **{"table": "*i64", "skipped": "*i1", "row": "*i32", "found_inf": "*fp32"},
    **dict.fromkeys(["partials", "gram", "full", "state", "tau", "settings"], "*fp64"),
    **dict.fromkeys(["values", "coefficients_R", "mean", "first_share"], "*fp64"),
    **dict.fromkeys(["coefficients", "mixture"], "*fp64"),
}
# Numbers that Triton finds to be multiples of 16 at a launch on a flat buffer's rows, and on padded
# rows of logits.
ALIGNED = ("out_stride", "bias_stride", "stride", "num_columns")

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = {FLOAT32: "*fp32", BFLOAT16: "*bf16", FLOAT16: "*fp16", FLOAT64: "*fp64"}
# One of each kind of launch.
SOME_GRAMS = (
    *itertools.product((1, 7, 22, 50, 128), (FLOAT32, BFLOAT16)),
    # The last of the pairs, and the first that are not: they spilled.
    *itertools.product((9, 12, 13, 14), (FLOAT32,)),
    # One to four tiles of 16 rows.
    *itertools.product((16, 33, 64), (FLOAT32,)),
    (16, FLOAT16),
    (7, FLOAT64),
    (22, FLOAT64),
    # Two tiles of rows at a time: the most shared memory.
    (129, FLOAT32),
    (129, BFLOAT16),
)
# In the metric of second moments: of pairs, of one to four tiles, of one and two large tiles.
SOME_METRICS = (
    *itertools.product((1, 7, 12, 22, 50, 64, 128, 129), (FLOAT32,), (FLOAT32,)),
    *itertools.product((7, 22, 50), (BFLOAT16,), (BFLOAT16, FLOAT32)),
    (7, FLOAT32, BFLOAT16),
    (7, FLOAT64, FLOAT64),
)
# Sums of pairs of rows.
SOME_HALVES = (
    *itertools.product((7, 11, 22, 50, 64, 128, 129), (FLOAT32,), (FLOAT32,)),
    *itertools.product((7, 22, 50), (BFLOAT16,), (FLOAT32,)),
    (22, FLOAT32, None),
    (7, FLOAT64, FLOAT64),
)
# The same with a weighted sum: of pairs, of one tile, of rows and gradients in 16 bits.
SOME_SUMS = (
    *itertools.product((1, 7, 11, 22, 50, 64), (FLOAT32,), (FLOAT32,)),
    *itertools.product((7, 22, 50), (BFLOAT16,), (FLOAT32, BFLOAT16)),
    (7, FLOAT64, FLOAT64),
)
# Those with the most registers, for GPUs of all kinds: A100, A40, L40, H100, RTX of Blackwell.
LARGE_GRAMS = (
    *itertools.product((12, 22, 50, 64, 128, 129), (FLOAT32,)),
    (129, BFLOAT16),
    (22, FLOAT64),
)
EVERY_ARCHITECTURE = (80, 86, 89, 90, 120)
SOME_PAIRS = ((FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT64, FLOAT64))


GAIN = ("factor", "mean", "rstd")


class Case(NamedTuple):
    """One compilation, and what has to be in its machine code."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    wide_loads: int = 0
    uses_matrix_units: bool = False
    pointers: Mapping[str, str] = {}
    """Types of those that depend on the case."""
    narrow_loads: int = 0
    """Of what is one number for each token."""


def gram_case(
    num_rows: int,
    dtype: torch.dtype,
    is_aligned: bool,
    moment: torch.dtype | None = None,
    halves: bool = False,
    out: torch.dtype | None = None,
) -> Case:
    """As gram.py launches them; `moment` and `out` are dtypes of vectors, if there are any."""
    is_scaled = moment is not None
    dtypes = tuple(each for each in (dtype, moment, out) if each is not None)
    sizes = gram.pick(
        *(num_rows, dtype), is_scaled=is_scaled, halves=halves, is_summed=out is not None
    )
    rows = "pairs of rows" if halves else "rows"
    of_metric = f" by {moment}" if is_scaled else ""
    of_metric += "" if out is None else f" with a sum in {out}"
    name = f"gram of {num_rows} {rows}, {dtype}{of_metric}, {'aligned' if is_aligned else 'ragged'}"
    constants = gram.vector_constants(dtypes, 1e-8) | {
        **({} if out else {"coefficients": None}),
        "R": num_rows,
        "HALVES": halves,
        "STORAGE": triton_dtype(dtype),
        "SUM": triton_dtype(sum_dtype(dtype)),
        "ALIGNED": is_aligned,
    }
    options = {"num_warps": sizes.num_warps}
    if isinstance(sizes, gram.Pairs):
        constants |= gram.columns_of(sizes, dtype, is_aligned)
        constants |= {"SQUARE": gram.square_entries((num_rows + halves) * num_rows)}
        constants |= {"PROGRAM_DOUBLINGS": sizes.program_doublings}
        # Every row in loads of 16 bytes of every thread.
        wide = (1 + halves) * num_rows * sizes.block * dtype.itemsize // (16 * 32 * sizes.num_warps)
        return Case(name, gram.gram_pairs, constants, options, wide * is_aligned)
    tiles = -(-num_rows // sizes.tile)
    product, is_split = gram.product_of(dtype, is_wide=halves or is_scaled)
    is_whole = tiles <= sizes.tiles
    constants |= {
        "TILES": tiles,
        "TILE": sizes.tile,
        "BLOCK": sizes.block,
        "PRODUCT": triton_dtype(product),
        "IS_WHOLE": is_whole,
        "IS_SPLIT": is_split,
        "PROGRAM_DOUBLINGS": gram.program_doublings(sizes, tiles * sizes.tile),
    }
    options |= {"num_stages": sizes.num_stages}
    loaded = (1 + halves) * (tiles if is_whole else 2) * sizes.tile
    wide = loaded * sizes.block * dtype.itemsize // (16 * 32 * sizes.num_warps)
    # Of second moments a lane loads one, in each of the stages.
    narrow = sizes.num_stages * is_scaled
    return Case(
        *(name, gram.gram_tiles, constants, options, wide * is_aligned, True), narrow_loads=narrow
    )


def reduce_case(rows: int) -> Case:
    sizes = gram.reduction(rows)
    constants = {"R": rows, "ENTRIES": rows**2, "SIDE": rows, "STRIDE": rows**2, "ADD": True}
    constants |= {"PROGRAMS": sizes.programs, "BLOCK": sizes.block}
    options = {"num_warps": sizes.num_warps}
    return Case(f"gram_reduce of {rows} rows", gram.gram_reduce, constants, options)


def weighted_sum_case(rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> Case:
    sizes = weighted_sum.pick(rows)
    constants = weighted_sum.constants_of(rows, dtype, out_dtype) | {"ALIGNED": True}
    name = f"weighted_sum of {rows} rows, {dtype} to {out_dtype}"
    options = {"num_warps": sizes.num_warps}
    return Case(name, weighted_sum.sum_chunk, constants, options, sizes.group)


def segment_sum_case(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    num_tokens: int,
    num_segments: int,
    *given: str,
    add: bool = False,
) -> Case:
    """Of 768 columns; `given` are the optional arguments that there are."""
    sizes = segment_sum.pick(num_tokens, num_segments, 768, sum_dtype(dtype, out_dtype))
    constants = segment_sum.constants_of(dtype, out_dtype, 768, sizes, add=add)
    optional = dict.fromkeys(("factor", "bias_values"), NAMES[dtype])
    optional |= dict.fromkeys(("mean", "rstd"), "*fp32") | {"borders": "*i64"}
    optional |= {"bias": NAMES[out_dtype]}
    # Each thread's part of a tile, for values and for the factor.
    tile = sizes.block_tokens * sizes.block_columns * dtype.itemsize
    wide = tile // (16 * 32 * segment_sum.NUM_WARPS) * (1 + ("factor" in given))
    return Case(
        f"segment_sum of {dtype} to {out_dtype}, {num_tokens} tokens in {num_segments}, "
        f"with {', '.join(given) or 'the values alone'}",
        segment_sum.sum_segments,
        constants | {name: None for name in optional if name not in given},
        {"num_warps": segment_sum.NUM_WARPS},
        wide,
        pointers=optional | {"values": NAMES[dtype], "out": NAMES[out_dtype]},
        # Mean and deviation of each of the thread's tokens, which are two of the wide ones.
        narrow_loads=wide * ("mean" in given),
    )


def sum_run_case(dtype: torch.dtype, out_dtype: torch.dtype) -> Case:
    """Of 768 columns, as an embedding's."""
    sizes = segment_sum.run_sizes(768, sum_dtype(dtype, out_dtype))
    tile = sizes.block_tokens * sizes.block_columns * dtype.itemsize
    return Case(
        f"segment_sum of {dtype} to {out_dtype}, by tokens",
        segment_sum.sum_run,
        segment_sum.constants_of(dtype, out_dtype, 768, sizes, add=True),
        {"num_warps": segment_sum.NUM_WARPS},
        tile // (16 * 32 * segment_sum.NUM_WARPS),
        pointers=dict.fromkeys(("segments", "order"), "*i64")
        | {"values": NAMES[dtype], "out": NAMES[out_dtype]},
    )


def cross_entropy_case(dtype: torch.dtype, *, has_shares: bool) -> Case:
    """Of padded rows."""
    constants = cross_entropy.constants_of(dtype)
    pointers = {"logits": NAMES[dtype], "targets": "*i64"}
    pointers |= dict.fromkeys(("shares", "losses"), NAMES[sum_dtype(dtype)])
    # Of both passes.
    wide = cross_entropy.BLOCK * dtype.itemsize // (16 * 32 * cross_entropy.NUM_WARPS)
    return Case(
        f"cross_entropy of {dtype}{', with gradients' if has_shares else ''}",
        cross_entropy.cross_entropy_of_row,
        constants | ({} if has_shares else {"shares": None}),
        {"num_warps": cross_entropy.NUM_WARPS},
        wide * (1 + has_shares),
        pointers=pointers,
        # What an odd vocabulary leaves of each pass, an element of a thread at a time; the logit of
        # the target, and the share.
        narrow_loads=(cross_entropy.BLOCK // (32 * cross_entropy.NUM_WARPS) + 1) * (1 + has_shares),
    )


def scale_rows_case(dtype: torch.dtype) -> Case:
    return Case(
        f"scale_rows of {dtype}",
        scale_rows.scale_piece,
        scale_rows.constants_of(dtype),
        {"num_warps": scale_rows.NUM_WARPS},
        1,
        pointers={"values": NAMES[dtype], "factors": "*fp32"},
        narrow_loads=1,
    )


def reweight_cases(num_rows: int) -> Iterator[Case]:
    num_domains = max(1, num_rows - 1)
    options = {"num_warps": reweight.NUM_WARPS}
    # All domains and the paper's score; half of them and the published code's.
    for num_used, score in ((num_rows, PAPER), (max(1, num_rows // 2), PUBLISHED)):
        constants = reweight.constants_of(num_rows, num_domains, num_used, score)
        name = f"reweight of {num_used} of {num_rows} rows, {score.name}"
        yield Case(name, reweight.reweight_once, constants, options)


def align_case(num_rows: int) -> Case:
    constants = aligned.constants_of(num_rows, max(1, num_rows - 1))
    options = {"num_warps": aligned.NUM_WARPS}
    return Case(f"align of {num_rows} rows", aligned.align_once, constants, options)


def cases() -> Iterator[Case]:
    """One of each kind of launch, of the usual dtypes."""
    for num_rows, dtype in SOME_GRAMS:
        yield gram_case(num_rows, dtype, True)
    yield gram_case(7, FLOAT32, False)
    yield gram_case(22, BFLOAT16, False)
    for num_rows, dtype, moment in SOME_METRICS:
        yield gram_case(num_rows, dtype, True, moment)
    yield gram_case(7, FLOAT32, False, FLOAT32)
    yield gram_case(22, BFLOAT16, False, FLOAT32)
    for num_rows, dtype, moment in SOME_HALVES:
        yield gram_case(num_rows, dtype, True, moment, halves=True)
    yield gram_case(22, FLOAT32, False, FLOAT32, halves=True)
    for num_rows, dtype, out in SOME_SUMS:
        moment = FLOAT64 if dtype == FLOAT64 else FLOAT32
        yield gram_case(num_rows, dtype, True, moment, halves=True, out=out)
    yield gram_case(7, FLOAT32, False, FLOAT32, halves=True, out=FLOAT32)
    yield reduce_case(22)
    for num_rows, (dtype, out_dtype) in itertools.product((1, 7, 22), SOME_PAIRS):
        yield weighted_sum_case(num_rows, dtype, out_dtype)
    yield from reweight_cases(8)
    yield from reweight_cases(64)
    for num_rows in (8, 64, 512):
        yield align_case(num_rows)
    for dtype in (FLOAT32, BFLOAT16):
        yield segment_sum_case(dtype, FLOAT32, 65536, 7, *GAIN)
        yield segment_sum_case(dtype, FLOAT32, 65536, 7, *GAIN, "bias")
        yield segment_sum_case(dtype, FLOAT32, 65536, 7, "borders")
        yield sum_run_case(dtype, FLOAT32)
    yield segment_sum_case(FLOAT32, FLOAT32, 512, 7)
    # Its second launch.
    yield segment_sum_case(FLOAT32, FLOAT32, 7 * 73, 7, "bias", "bias_values")
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        yield cross_entropy_case(dtype, has_shares=True)
        yield scale_rows_case(dtype)
    yield cross_entropy_case(BFLOAT16, has_shares=False)
    yield cross_entropy_case(FLOAT64, has_shares=True)
    yield scale_rows_case(FLOAT64)


def spills() -> dict[str, list[int | None]]:
    """Bytes of a thread's stack, for each of `EVERY_ARCHITECTURE`; None: it does not compile."""
    large = [gram_case(num_rows, dtype, True) for num_rows, dtype in LARGE_GRAMS]
    found: dict[str, list[int | None]] = {}
    for case in [*large, *reweight_cases(64)]:
        stack_bytes = found.setdefault(case.name.replace("torch.", "").replace(", aligned", ""), [])
        for architecture in EVERY_ARCHITECTURE:
            try:
                stack_bytes.append(inspect(compiled(case, architecture))["stack_bytes"])
            except triton.CompilationError:
                stack_bytes.append(None)
    return found


def compiled(case: Case, architecture: int) -> Any:
    """Triton's kernel for one compute capability."""
    names = case.kernel.arg_names
    pointers = POINTERS | case.pointers
    signature = {
        name: "constexpr" if name in case.constants else pointers.get(name, "i32") for name in names
    }
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if (name in pointers and name not in case.constants) or name in ALIGNED
    }
    source = ASTSource(
        fn=case.kernel, signature=signature, constexprs=case.constants, attrs=aligned
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options=case.options | {"enable_fp_fusion": True},
    )


def inspect(kernel: Any) -> dict[str, int]:
    """Spilled bytes, and how many instructions there are of some kinds."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = printed_by(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = printed_by(TOOLS / "nvdisasm", "-c", file.name)
    stack = re.search(r"STACK:(\d+)", usage)
    loads = re.findall(r"\bLDG(?:STS)?\.\S*", assembly)
    return {
        "stack_bytes": int(stack[1]),
        "shared_bytes": kernel.metadata.shared,
        "wide_loads": sum(".128" in load for load in loads),
        # Eight bytes are an address, a length or a coefficient.
        "narrow_loads": sum(not re.search(r"\.(64|128)", load) for load in loads),
        "matrix_products": len(re.findall(r"\b[HD]G?MMA\.", assembly)),
    }


def judged(case: Case, architecture: int) -> dict[str, int]:
    """What `inspect` finds, and whether it is right.

    No spills, rows in loads of 16 bytes alone, matrix units where meant, and room for it.
    """
    found = inspect(compiled(case, architecture))
    # Of reductions, of ragged blocks and of the K x K step nothing is wanted.
    is_only_wide = found["narrow_loads"] <= case.narrow_loads or case.wide_loads == 0
    has_products = (found["matrix_products"] > 0) == case.uses_matrix_units
    fits = not found["stack_bytes"] and found["shared_bytes"] <= SHARED_BYTES[architecture]
    is_wide = found["wide_loads"] >= case.wide_loads
    found |= {"wanted": case.wide_loads}
    return found | {"is_right": is_wide and is_only_wide and has_products and fits}


if __name__ == "__main__":
    if sys.argv[1:] == ["spills"]:
        print(json.dumps(spills()))
        sys.exit()
    part, parts = map(int, sys.argv[1:])
    mine = itertools.islice(itertools.product(cases(), ARCHITECTURES), part, None, parts)
    print(json.dumps({f"{case.name}, sm_{number}": judged(case, number) for case, number in mine}))
