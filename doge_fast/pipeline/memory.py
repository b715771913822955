"""Whether a run fits, before it begins: the least it needs, and what is free."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from doge_fast.pipeline import ranks

FLOAT32, INT64 = 4, 8
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def size_text(num_bytes: float) -> str:
    """1.20MB."""
    return str(tqdm.format_sizeof(num_bytes, "B"))


def needed(num_parameters: int, num_rows: int = 0) -> dict[str, int]:
    """{what: bytes} of what has the model's size, for each process.

    `num_parameters` train; of `num_rows` domains and targets a step keeps a gradient each.
    """
    size = FLOAT32 * num_parameters
    # AdamW has two moments.
    parts = {"parameters": size, "gradients": size, "AdamW": 2 * size}
    if num_rows:
        # Rank r of n has the domains from r K / n to (r + 1) K / n, parts of domains included.
        number = ranks.number()
        here = max(-(-(r + 1) * num_rows // number) - r * num_rows // number for r in range(number))
        parts[f"gradients of {here} rows"] = here * size
    return parts


def batch(num_tokens: int) -> dict[str, int]:
    """{what: bytes} of the tokens of a step, all ranks' together; each shares them."""
    return {"tokens of a step": -(-num_tokens // ranks.number()) * INT64}


def free_bytes(device: torch.device) -> int:
    """What is free for this process: of a GPU, or of the machine with its swap.

    A container's limit counts for the machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free: int = psutil.virtual_memory().available + psutil.swap_memory().free
    for path in map(Path, _LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            free = min(free, int(text))
    return free


def refuse_what_cannot_fit(parts: Mapping[str, int], device: torch.device, *, advice: str) -> None:
    """ValueError where {what: bytes} that a run keeps at once, without activations, cannot fit.

    Processes of one machine share its memory, and have a GPU each. `advice` says how to need less.
    """
    free = free_bytes(device)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if device.type == "cpu" else 1
    needed = num_here * sum(parts.values())
    if needed <= free:
        return
    told = ", ".join(f"{what} {size_text(size)}" for what, size in parts.items() if size)
    where = f"{num_here} processes on this machine need" if num_here > 1 else "This run needs"
    raise ValueError(
        f"{where} at least {size_text(needed)} ({told}; activations come on top), and "
        f"{size_text(free)} of {device.type} memory are free. {advice}"
    )
