"""Counts the work of whole steps on the fake device, at full size and without memory.

    python -m tests.fake_cuda.work benchmarks/results/predicted.json

Tensors have sizes alone (`FakeTensorMode`). Each operator reads its inputs and writes its outputs;
views cost nothing. Of a compiled body the kernels are those of inductor's scheduler
(`compiled.py`).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import models, optimizer_step, protocol, steps
from benchmarks.predicted import SMALL_BYTES, Work
from benchmarks.steps import DogeStep, PlainStep, Problem
from doge_fast import losses
from doge_fast.kernels.cross_entropy import cross_entropy_torch
from doge_fast.kernels.scale_rows import scale_rows_torch
from doge_fast.stacked.layers import linear
from tests import fake_cuda
from tests.fake_cuda import compiled

SIZES = (("82M", 7), ("82M", 22), ("82M", 50), ("124M", 7), ("124M", 22), ("124M", 50))
# Views that their schemas do not tell, and memory alone.
FREE = {
    *("device", "detach", "_unsafe_view", "alias", "lift_fresh", "unbind"),
    *("empty", "empty_strided", "empty_like", "new_empty", "is_pinned", "_pin_memory"),
}
# They write the first argument and do not read it.
OVERWRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}


class Kernel(NamedTuple):
    """One operator: what it computes, and the memory that it reads and writes."""

    name: str
    flops: int
    reads: dict[int, int]
    """{memory: bytes}"""
    writes: dict[int, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Counted(TorchDispatchMode):
    """Notes the kernels that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.is_on = True
        # No memory may get the name of another.
        self.kept: list[Any] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs under it."""
        return True

    def add(self, name: str, num_bytes: int) -> None:
        """A kernel that is not dispatched; its operations are not known."""
        self.kernels.append(Kernel(name, 0, {0: num_bytes}, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if not self.is_on or func.is_view or name in FREE:
            return result
        pairs = list(zip(func._schema.arguments, args, strict=False))
        pairs += [
            (each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs
        ]
        read: list[Tensor] = []
        written = _tensors(result)
        for argument, value in pairs:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_result = argument.kwarg_only or argument.name.startswith("out") or name in OVERWRITE
            written += _tensors(value) if is_written else []
            read += [] if is_written and is_result else _tensors(value)
        if name in ("gather", "scatter_add_", "embedding"):
            # As many numbers as there are indices, or of a table the rows that are looked up.
            written = read = [args[2] if name == "scatter_add_" else result]
        flops = 0
        if name == "wide_product":
            out, left, right, adds = args
            flops = 2 * left.numel() * right.shape[-1]
            read = [left, right, *([out] if adds else [])]
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        self.kept += [read, written]
        reads, writes = _by_memory(read), _by_memory(written)
        if name == "cross_entropy" and args[2] is not None:
            # Twice; the second time as likely from the cache.
            reads[id(args[0])] = _num_bytes(args[0])
        if name == "segment_sum" and args[2] and args[4] is not None:
            # Added to the vectors that tokens looked up, at most one for each token.
            out = args[1]
            reads[id(out)] = size = args[0].numel() * out.itemsize
            writes = {id(out): size}
        if name == "scale_rows":
            # The loss's gradient is 1.
            reads, writes = {}, {}
        self.kernels.append(Kernel(name, flops, reads, writes))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _by_memory(tensors: Sequence[Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in tensors:
        memory = each.untyped_storage()._cdata
        found[memory] = max(found.get(memory, 0), _num_bytes(each))
    return found


def _num_bytes(tensor: Tensor) -> int:
    """Of what is there once: an expanded dimension counts as one."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.itemsize


def work_of(kernels: Sequence[Kernel], uncompiled: Sequence[Kernel] = ()) -> Work:
    """The sums of all kernels; operations of a compiled step are those of the `uncompiled` one."""
    small = [each for each in kernels if not each.flops and each.num_bytes < SMALL_BYTES]
    return Work(
        flops=sum(each.flops for each in uncompiled or kernels),
        num_bytes=sum(each.num_bytes for each in kernels) - sum(each.num_bytes for each in small),
        gram_bytes=sum(each.num_bytes for each in kernels if each.name == "gram"),
        launches=len(small),
    )


class FusedPlain(PlainStep):
    """Plain training with the gradients of the logits in their memory."""

    def backward(self) -> None:
        """All tokens at once."""
        with models.mixed_precision(self.batch.device, self.problem.autocast_dtype):
            hidden = self.model.hidden(self.batch)
        weight = self.model.head.weight
        flat = hidden.detach()[:, :-1].flatten(0, 1).bfloat16()
        narrow = weight.detach().bfloat16()
        logits = torch.mm(flat, narrow.t())
        targets = self.batch[:, 1:].flatten()
        shares = torch.ones(len(logits), device=logits.device)
        losses.cross_entropy(logits, targets, shares)
        grad = torch.mm(logits, narrow).view(len(self.batch), -1, hidden.shape[2])
        grad_weight = torch.mm(logits.t(), flat)
        hidden[:, :-1].backward(grad.to(hidden.dtype))
        assert weight.grad is not None
        weight.grad += grad_weight


_library = torch.library.Library("doge_fast_work", "DEF")
_library.define("wide_product(Tensor(a!) out, Tensor left, Tensor right, bool adds) -> ()")
_library.impl("wide_product", lambda *_: None, "CompositeExplicitAutograd")
torch.library.register_fake("doge_fast_work::wide_product", lambda *_: None, lib=_library)


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, options["is_causal"])[0]


def kernels_of(
    kind: type[PlainStep],
    problem: Problem,
    *,
    is_torch: bool = False,
    is_compiled: bool = False,
) -> list[Kernel]:
    """Those of a step after the first.

    With `is_torch` those of plain torch around the logits; with `is_compiled` those of a compiled
    body.
    """
    patches = [
        mock.patch.object(nn.functional, "scaled_dot_product_attention", _attention),
        mock.patch.object(linear, "multiply_wide", torch.ops.doge_fast_work.wide_product),
    ]
    if is_torch:
        torch_entropy = lambda *args: cross_entropy_torch(*args)  # noqa: E731
        patches += [
            mock.patch.object(losses, "cross_entropy", torch_entropy),
            mock.patch.object(losses, "scale_rows", scale_rows_torch),
            # A domain at a time, as at the commit that was measured.
            mock.patch.object(losses, "CHUNK_BYTES_ELSEWHERE", 0),
        ]
    counted = Counted()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for patch in patches:
            patch.start()
        try:
            step = kind(problem, "cuda")
            if is_compiled:
                torch.compiler.reset()
                backend = compiled.backend(counted)
                step.model.hidden = torch.compile(step.model.hidden, backend=backend)
            step()
            counted.kernels.clear()
            with counted:
                step()
        finally:
            mock.patch.stopall()
    return counted.kernels


def rows(sizes: Sequence[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """The work of each step, as it was measured and as it is now."""
    for model, num_domains in sizes:
        problem = optimizer_step.paper_problem(
            model, num_domains, mode=steps.STACKED, autocast="bfloat16"
        )
        narrow = replace(problem, buffer_dtype="bfloat16")
        before, now = (kernels_of(DogeStep, problem, is_torch=each) for each in (True, False))
        plain = kernels_of(FusedPlain, problem)
        work = {
            "plain, measured": work_of(kernels_of(PlainStep, problem, is_torch=True)),
            "stacked, measured": work_of(before),
            "fastest plain": work_of(kernels_of(FusedPlain, problem, is_compiled=True), plain),
            "fused head": work_of(kernels_of(DogeStep, problem, is_compiled=True), now),
            "16-bit rows": work_of(kernels_of(DogeStep, narrow, is_compiled=True), now),
        }
        # The head of plain torch, beside a compiled body.
        of_head = zip(work["fused head"], work_of(before), work_of(now), strict=True)
        work["compiled body"] = Work(*(body + old - new for body, old, new in of_head))
        every = {name: each._asdict() for name, each in work.items()}
        yield {"model": model, "domains": num_domains, "work": every}


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    names = [f"{model}-{num_domains}" for model, num_domains in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names, metavar="MODEL-K")
    args = parser.parse_args()
    if "fake_cuda" not in os.environ.get("LD_PRELOAD", ""):
        # Again, with the device in the process from its beginning.
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, **fake_cuda.build(Path(folder))}
            environment["DOGE_FAST_BACKEND"] = "torch"
            program = [sys.executable, "-m", "tests.fake_cuda.work", *sys.argv[1:]]
            sys.exit(os.spawnve(os.P_WAIT, sys.executable, program, environment))
    fake_cuda.pytest_configure()
    compiled.describe_device()
    sizes = [size for size, name in zip(SIZES, names, strict=True) if name in args.sizes]
    found = list(rows(sizes))
    protocol.write(args.json, {"benchmark": "work", "torch": torch.__version__, "rows": found})


if __name__ == "__main__":
    main()
