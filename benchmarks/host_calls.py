"""What a step costs the host: Python calls, operators that are dispatched, and time.

On a GPU a small model, or one with many domains, waits for the host. Here is a GPT-2 of twelve
layers (148 parameters) on the "meta" device, whose tensors have no values: nothing is computed,
and our code takes the ways of an accelerator. For K domains each row is one whole step:

    plain       one forward and backward of all domains' losses, then the optimizer
    stacked     the same inside `optimizer.stacked`
    passes      K times a forward and backward, then the optimizer; no domains
    sequential  the same, each inside `optimizer.domain`

Counted in it: calls of functions of this library, all Python calls, operators that torch
dispatches, and those of them that make no view. What an operator does inside is not counted, so our
own are one each; attention is one, as on a GPU, and so is the wrapped optimizer's step.

    python -m benchmarks.host_calls
    python -m benchmarks.host_calls --domains 7 22 50 --json host_calls.json

Times are CPU time of this process, the least of several in turns, since others on the machine only
add to it:

    domain      of one `with optimizer.domain(name):`, on meta. Inside is the least backward pass
                that there is, which makes an empty gradient for each parameter; the time of those
                passes alone, each followed by taking `p.grad` away, is subtracted.
    combine     of `optimizer.combine()` on meta: what surrounds the operators.
    gram, weighted_sum   of one call at the step's blocks, up to the launch, which does nothing: on
                CPU memory, since only memory has addresses to make a table of.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import doge_fast
from benchmarks import protocol, steps
from benchmarks.models import Shape
from benchmarks.steps import DogeStep, PlainStep, Problem
from doge_fast import DoGEOptimizer
from doge_fast.kernels import build, dispatch, gram, weighted_sum

META = torch.device("meta")
SHAPE = Shape(12, 12, 768, sequence=128)
DOMAINS = (7, 22, 50)
ROUNDS = 15
FOLDERS = tuple(
    str(Path(doge_fast.__file__).resolve().parent.parent / name)
    for name in ("doge_fast", "kernels")
)


class FusedSGD(torch.optim.Optimizer):
    """A step in one operator that takes the flag of a skipped one, as torch's fused ones do."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One operator for each group."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            torch._foreach_add_(params, [p.grad for p in params], alpha=-group["lr"])


class Counts(TorchDispatchMode):
    """Counts what torch dispatches, and Python calls outside of it.

    Inside an operator nothing counts: on meta many are Python functions, on a GPU none is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.calls = self.operators = self.no_views = 0
        self._is_inside = False

    def __enter__(self) -> "Counts":
        super().__enter__()
        # Also on the thread that autograd runs hooks on, which is this one for meta.
        sys.setprofile(self._count_call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._is_inside = True
        self.operators += 1
        # `_unsafe_view` and `detach` give the memory that they were given, too.
        self.no_views += not (function.is_view or function in (_UNSAFE_VIEW, _DETACH))
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._is_inside = False

    def _count_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not self._is_inside and frame.f_code.co_filename not in _COUNTING:
            self.calls += 1
            self.ours += frame.f_code.co_filename.startswith(FOLDERS)


_UNSAFE_VIEW, _DETACH = torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default


_COUNTING = (__file__, python_dispatch.__file__)


@cache
def calls_of_counting() -> int:
    """Python calls that torch makes to hand one operator to a mode."""
    x = torch.empty(1, device=META)
    for _ in range(2):
        # Twice: at the first, torch imports much.
        with Counts() as counts:
            x.detach()
    return counts.calls


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """One operator forward and one backward; on meta torch would write the products out."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        mixed: Tensor = flash(query, key, value, 0.0, is_causal)[0]
        return mixed

    with mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


def sides(shape: Shape, num_domains: int) -> dict[str, PlainStep]:
    """The four steps, on meta."""
    made: dict[str, PlainStep] = {}
    with mock.patch.object(steps, "adamw", lambda params, device: FusedSGD(params)):
        for mode, plain, doge in (
            (steps.STACKED, "plain", "stacked"),
            (steps.SEQUENTIAL, "passes", "sequential"),
        ):
            problem = Problem(shape, num_domains, num_domains, mode=mode, package="torch")
            made[plain] = PlainStep(problem, META)
            made[doge] = DogeStep(problem, META)
    return made


def counts_of(step: Callable[[], None]) -> dict[str, int]:
    """Of one step, after one that allocates, and for which torch imports what counting needs."""
    with attention_of_a_gpu():
        for _ in range(2):
            with Counts() as counts:
                step()
    return {
        "ours": counts.ours,
        "calls": counts.calls - counts.operators * calls_of_counting(),
        "operators": counts.operators,
        "no_views": counts.no_views,
    }


def times_of(shape: Shape, num_domains: int, rounds: int) -> dict[str, float]:
    """Microseconds of a domain, of combining, and of the two operators that read all rows."""
    # Two models: hooks visit the parameters of the one alone.
    plain, params = (
        list(PlainStep(Problem(shape, 1, 1, package="torch"), META).model.parameters())
        for _ in range(2)
    )
    names = [f"domain{row}" for row in range(num_domains)]
    optimizer = DoGEOptimizer(FusedSGD(params), domains=names, mu=1.0, micro_batches=None)
    of: dict[str, list[float]] = {"alone": [], "with_us": [], "combine": []}
    for _ in range(rounds + 1):
        of["alone"].append(seconds(lambda: passes_alone(plain, num_domains)))
        of["with_us"].append(seconds(lambda: passes_in_domains(optimizer, params, names)))
        of["combine"].append(seconds(optimizer.combine))
        optimizer.step()
        optimizer.zero_grad()
    of |= times_of_operators([param.numel() for param in params], num_domains, rounds)
    least = {name: 1e6 * min(values) for name, values in of.items()}
    domain = (least.pop("with_us") - least.pop("alone")) / num_domains
    return {"domain": domain, **least}


class Gradients(torch.autograd.Function):
    """The least backward pass that there is: it makes a gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        """A loss that depends on all."""
        ctx.params = params
        return torch.empty((), device=META)

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor, ...]:
        """Fresh memory, which autograd hands on without a copy."""
        # `empty_like` is a Python function on meta.
        return tuple(torch.empty(param.shape, device=META) for param in ctx.params)


def passes_alone(params: list[Tensor], num_domains: int) -> None:
    """A pass for each domain, after which `p.grad` is taken away."""
    for _ in range(num_domains):
        Gradients.apply(*params).backward()
        for param in params:
            param.grad = None


def passes_in_domains(optimizer: DoGEOptimizer, params: list[Tensor], names: list[str]) -> None:
    """The same, each in a domain."""
    for name in names:
        with optimizer.domain(name):
            Gradients.apply(*params).backward()


def times_of_operators(sizes: list[int], num_rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of calls of `gram` and `weighted_sum` whose launches do nothing."""
    # The host's work does not depend on how long a row is: short ones fit the memory of any host.
    lengths = [64 + size % 64 for size in sizes]
    blocks = [torch.zeros(num_rows, length) for length in lengths]
    outs = [torch.zeros(length) for length in lengths]
    coefficients_R = torch.ones(num_rows, dtype=torch.float64)
    of: dict[str, list[float]] = {"gram": [], "weighted_sum": []}
    with launches_of_nothing():
        for _ in range(rounds + 1):
            of["gram"].append(seconds(lambda: gram(blocks, implementation="cuda")))
            of["weighted_sum"].append(
                seconds(
                    lambda: weighted_sum(blocks, coefficients_R, out=outs, implementation="cuda")
                )
            )
    return of


@contextmanager
def launches_of_nothing() -> Iterator[None]:
    """The CUDA implementations run on CPU memory, up to their launches."""
    nothing = SimpleNamespace(gram=lambda *_: None, weighted_sum=lambda *_: None)
    with (
        mock.patch.dict(dispatch._chosen),
        mock.patch.dict(dispatch._reasons, {("cuda", torch.device("cpu")): None}),
        mock.patch.dict(build._outcomes, {build.EMULATED: None}),
        mock.patch.object(build, "cuda_operators", return_value=nothing),
    ):
        yield


def seconds(function: Callable[[], Any]) -> float:
    """Of CPU time, which other processes on the machine do not add to."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(num_domains: int, *, shape: Shape = SHAPE, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row: counts of the four steps, and times."""
    counts = {name: counts_of(step) for name, step in sides(shape, num_domains).items()}
    ratio = counts["stacked"]["no_views"] / counts["plain"]["no_views"]
    times = times_of(shape, num_domains, rounds)
    return {
        "domains": num_domains,
        "counts": counts,
        "stacked_over_plain": protocol.rounded(ratio),
        "microseconds": {name: protocol.rounded(value) for name, value in times.items()},
    }


def lines(row: dict[str, Any]) -> str:
    """A row for people."""
    text = [f"K = {row['domains']:<9}{'ours':>9}{'calls':>9}{'operators':>11}{'no views':>10}"]
    text += [
        f"  {name:11}{n['ours']:9}{n['calls']:9}{n['operators']:11}{n['no_views']:10}"
        for name, n in row["counts"].items()
    ]
    text.append(f"  stacked over plain, operators that make no view: {row['stacked_over_plain']}")
    times = ", ".join(f"{name} {value:.0f}" for name, value in row["microseconds"].items())
    return "\n".join([*text, f"  microseconds: {times}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, count, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domains", nargs="+", type=int, default=list(DOMAINS), help="K")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for num_domains in args.domains:
        rows.append(measure(num_domains, rounds=args.rounds))
        print(lines(rows[-1]), flush=True)
    if args.json:
        record = {"benchmark": "host_calls", **protocol.machine("cpu"), "rows": rows}
        protocol.write(args.json, record)


if __name__ == "__main__":
    main()
