"""Compiles the Triton kernels for GPUs that need not be there; prints what came out, as JSON.

Run as a program without TRITON_INTERPRET, which would leave nothing to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from doge_fast.kernels.accumulate import triton_kernel as accumulate_kernel
from doge_fast.kernels.accumulate.launch import LAUNCH as ACCUMULATE
from doge_fast.kernels.gram import triton_kernel as gram_kernel
from doge_fast.kernels.gram.launch import PairsLaunch, pick
from doge_fast.kernels.triton_support import sum_dtype, triton_dtype
from doge_fast.kernels.weighted_sum import triton_kernel as weighted_sum_kernel
from doge_fast.kernels.weighted_sum.launch import LAUNCH as WEIGHTED_SUM

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {"table": "*i64", "partials": "*fp64", "gram": "*fp64", "coefficients_R": "*fp64"}


def gram_constants(num_rows: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Kernel, compile-time arguments and options of a launch, as launch.py would give them."""
    launch = pick(num_rows, dtype)
    constants = {
        "R": num_rows,
        "BLOCK": launch.block,
        "STORAGE": triton_dtype(dtype),
        "SUM": triton_dtype(sum_dtype(dtype)),
        "ALIGNED": True,
    }
    if isinstance(launch, PairsLaunch):
        constants["SQUARE"] = triton.next_power_of_2(num_rows * num_rows)
        return gram_kernel.gram_pairs, constants, {"num_warps": launch.num_warps}
    constants |= {
        "TILES": -(-num_rows // launch.tile),
        "TILE": launch.tile,
        "WAYS": launch.ways,
        "PRODUCT": triton_dtype(dtype),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return gram_kernel.gram_tiles, constants, options


def kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, int]]]:
    """What is compiled, by name."""
    found = {
        f"gram of {num_rows} rows, {dtype}": gram_constants(num_rows, dtype)
        for num_rows, dtype in [
            (7, torch.float32),
            (22, torch.float32),
            (50, torch.float32),
            (7, torch.bfloat16),
        ]
    }
    found["weighted_sum"] = (
        weighted_sum_kernel.weighted_sum,
        {
            "R": 22,
            "CHUNK": WEIGHTED_SUM.chunk_columns,
            "BLOCK": WEIGHTED_SUM.block,
            "STORAGE": triton_dtype(torch.float32),
            "OUTPUT": triton_dtype(torch.float32),
            "SUM": triton_dtype(torch.float32),
            "ALIGNED": True,
        },
        {"num_warps": WEIGHTED_SUM.num_warps},
    )
    found["accumulate"] = (
        accumulate_kernel.accumulate,
        {
            "CHUNK": ACCUMULATE.chunk_columns,
            "BLOCK": ACCUMULATE.block,
            "GRADIENT": triton_dtype(torch.bfloat16),
            "ROW": triton_dtype(torch.float32),
            "SUM": triton_dtype(torch.float32),
            "ADD": True,
            "ALIGNED": True,
        },
        {"num_warps": ACCUMULATE.num_warps},
    )
    return found


def compiled(kernel: Any, constants: dict[str, Any], options: dict[str, int], arch: int) -> bytes:
    """The machine code for one compute capability."""
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if name in POINTERS
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    code: bytes = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm[
        "cubin"
    ]
    return code


def inspect(cubin: bytes) -> dict[str, int]:
    """Spilled bytes, and how many loads from memory are 16 bytes wide."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = run(TOOLS / "nvdisasm", "-c", file.name)
    stack = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert stack is not None
    return {
        "registers": int(stack[1]),
        "stack_bytes": int(stack[2]),
        "wide_loads": len(re.findall(r"(?:LDG|LDGSTS)\S*128", assembly)),
    }


def run(*command: Path | str) -> str:
    """What a tool prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    measured = {
        f"{name}, sm_{arch}": inspect(compiled(*what, int(arch)))
        for arch in sys.argv[1:]
        for name, what in kernels().items()
    }
    print(json.dumps(measured))
