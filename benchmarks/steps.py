"""A plain step and a DoGE step on the same model, tokens and micro-batches.

Sequential: both run one forward and backward per domain. Stacked: both run one over the whole
batch. Then one AdamW step. The plain side adds the gradients up in `p.grad`; the DoGE side keeps
them apart, takes their Gram matrix, moves the domain weights and combines them.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import cases, models
from benchmarks.models import Shape
from doge_fast import DoGEOptimizer

SEQUENTIAL, STACKED = "sequential", "stacked"
MODES = (SEQUENTIAL, STACKED)
LEARNING_RATE = 1e-4
# Steps after which memory is allocated, tables are uploaded and kernels are compiled.
WARM_UP = 3


@dataclass(frozen=True)
class Problem:
    """Model, domains and precision of a step."""

    shape: Shape
    num_domains: int
    num_sequences: int
    """Of all domains together, dealt out evenly."""
    mode: str = SEQUENTIAL
    """A domain's share is one micro-batch; or "stacked": all shares are one batch."""
    autocast: str | None = None
    """A dtype of torch by name; None: float32 throughout."""
    buffer_dtype: str | None = None
    """Of the stored domain gradients; None: that of the gradients."""
    bar: float | None = None
    """The ratio to a plain step that must not be passed; of the aligned rule, to the paper's."""
    score: Literal["paper", "aligned"] = "paper"
    """That of the DoGE side."""
    keep_rows: bool = True
    """Of a stacked pass, as for `DoGEOptimizer.stacked`."""

    @property
    def num_tokens(self) -> int:
        """Per step."""
        return self.num_sequences * self.shape.sequence

    @property
    def num_rows(self) -> int:
        """Of the buffer."""
        return self.num_domains * (2 if self.score == "aligned" else 1)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """As torch knows it."""
        return None if self.autocast is None else getattr(torch, self.autocast)

    @classmethod
    def from_dict(cls, parts: dict[str, Any]) -> "Problem":
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**parts, "shape": Shape(**parts["shape"])})

    def __str__(self) -> str:
        precision = f", {self.autocast} autocast" if self.autocast else ""
        buffer = f", rows in {self.buffer_dtype}" if self.buffer_dtype else ""
        tokens = f"{self.num_sequences} x {self.shape.sequence} tokens"
        tokens += f", {STACKED}" if self.mode == STACKED else ""
        tokens += f", {self.score}" if self.score != "paper" else ""
        tokens += "" if self.keep_rows else ", rows not kept"
        return f"K={self.num_domains}, {tokens}, {self.shape}{precision}{buffer}"


class PlainStep:
    """The mean of the domains' losses, then AdamW."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.problem = problem
        self.model = models.build(problem.shape, device)
        self.data = batches(problem, device)
        self.sizes = {name: len(tokens) for name, tokens in self.data.items()}
        if problem.mode == STACKED:
            self.batch = torch.cat(list(self.data.values()))
        self.optimizer: torch.optim.Optimizer = adamw(self.model.parameters(), device)

    def loss(self, tokens: Tensor) -> Tensor:
        """Of one domain."""
        return models.loss_of(self.model, tokens, self.problem.autocast_dtype)

    def sum_of_losses(self) -> Tensor:
        """Of all domains, from one forward."""
        sizes = list(self.sizes.values())
        return models.sum_of_losses(self.model, self.batch, sizes, self.problem.autocast_dtype)

    def backward(self) -> None:
        """All domains."""
        if self.problem.mode == STACKED:
            (self.sum_of_losses() / self.problem.num_domains).backward()
            return
        for tokens in self.data.values():
            (self.loss(tokens) / self.problem.num_domains).backward()

    def __call__(self) -> None:
        """One step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DogeStep(PlainStep):
    """The same with domain gradients, Gram matrix, mirror step and weighted sum."""

    optimizer: DoGEOptimizer

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        buffer_dtype = problem.buffer_dtype
        # The combined gradient is compared with one of autograd's, which cuts nothing.
        settings: dict[str, Any] = {"mu": 1.0, "domain_max_grad_norm": None}
        if problem.score == "aligned":
            settings = {"score": "aligned"}
        self.optimizer = DoGEOptimizer(
            self.optimizer,
            domains=list(self.data),
            buffer_dtype=None if buffer_dtype is None else getattr(torch, buffer_dtype),
            **settings,
        )

    def backward(self) -> None:
        """All domains."""
        if self.problem.mode == STACKED:
            keep_rows = self.problem.keep_rows
            with self.optimizer.stacked(self.model, self.sizes, keep_rows=keep_rows):
                self.sum_of_losses().backward()
            return
        for name, tokens in self.data.items():
            with self._domain(name, len(tokens)):
                self.loss(tokens).backward()

    def _domain(self, name: str, size: int) -> AbstractContextManager[None]:
        if self.problem.score == "aligned":
            # Both halves in one pass, which a stacked batch of one domain is.
            return self.optimizer.stacked(self.model, {name: size})
        return self.optimizer.domain(name)


SIDES: dict[str, Callable[[Problem, torch.device | str], PlainStep]] = {
    "plain": PlainStep,
    "doge": DogeStep,
}


def side(name: str, problem: dict[str, Any], device: str) -> PlainStep:
    """What `memory.peak_bytes` names."""
    return SIDES[name](Problem.from_dict(problem), device)


def arguments_of(name: str, problem: Problem) -> dict[str, Any]:
    """Of `side`, as JSON can say them."""
    return {"name": name, "problem": asdict(problem)}


def batches(problem: Problem, device: torch.device | str) -> dict[str, Tensor]:
    """{domain: tokens [B_k, L]}, the same for all sides."""
    return models.domain_batches(problem.shape, problem.num_domains, problem.num_sequences, device)


def adamw(params: Iterable[Tensor], device: torch.device | str) -> torch.optim.AdamW:
    """On a GPU fused, so that a skipped step needs no word from the host, and capturable."""
    on_gpu = torch.device(device).type == "cuda"
    options = {"fused": True, "capturable": True} if on_gpu else {}
    return torch.optim.AdamW(params, lr=LEARNING_RATE, **options)


def check(problem: Problem, device: torch.device | str) -> float:
    """`gradient_error`; raises where it is more than rounding."""
    error = gradient_error(problem, device)
    # float32: sums of K rows, a few units of 6e-8. With 16 bits a backward pass on a GPU does
    # not even repeat itself: attention adds in changing order before it rounds.
    is_rounded = problem.autocast is not None or problem.buffer_dtype is not None
    if not error < (2**-7 if is_rounded else 1e-5):
        raise RuntimeError(f"the combined gradient is off by {error:.1e}; nothing is timed.")
    return error


def gradient_error(problem: Problem, device: torch.device | str) -> float:
    """Largest error of the combined gradient over its largest element, against autograd's.

    In the precision of the problem, of which both sides see the same; sums are float64 here.
    """
    doge = DogeStep(problem, device)
    doge.backward()
    doge.optimizer.combine()
    params = list(doge.model.parameters())
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for alpha, tokens in zip(doge.optimizer.alpha.tolist(), doge.data.values(), strict=True):
        for total, grad in zip(
            expected, torch.autograd.grad(doge.loss(tokens), params), strict=True
        ):
            total += alpha * grad.double()
    return cases.relative_error([p.grad for p in params], expected)  # type: ignore[misc]


def host_synchronisations(problem: Problem, device: torch.device | str) -> str:
    """What a whole step makes the host wait for after warm-up: "none", or torch's complaint.

    From the first domain to the end of `step()`: forward and backward passes, Gram matrix, domain
    weights, weighted sum and AdamW. Torch raises at the first operation that waits for the device.
    """
    doge = DogeStep(problem, device)
    for _ in range(WARM_UP):
        doge()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        doge()
    except RuntimeError as complaint:
        return str(complaint).strip().splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def captured_step_error(device: torch.device | str, *, num_domains: int = 7) -> float:
    """Largest difference of parameters and weights after replays of a captured step.

    Against a twin that is never captured; both are given the same gradients to the last bit.
    Captured is the whole step, from the first domain to the end of `step()`. The gradients are
    others in every step, so that a replay must read them anew.
    """
    captured, twin = _Directed(num_domains, device), _Directed(num_domains, device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # Autograd remembers the stream where a parameter was first used; a capture needs a stream of
    # its own.
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            captured.turn()
            captured()
    with torch.cuda.graph(graph, stream=stream):
        captured()
    for _ in range(WARM_UP):
        captured.turn()
        graph.replay()
    for _ in range(2 * WARM_UP):
        twin.turn()
        twin()
    pairs = list(zip(captured.params, twin.params, strict=True))
    pairs.append((captured.optimizer.alpha_mean, twin.optimizer.alpha_mean))
    return cases.largest(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


class _Directed:
    """Parameters whose domain gradients are given, so that nothing depends on a kernel's order."""

    def __init__(self, num_domains: int, device: torch.device | str) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        shapes = [(64, 128), (1000,), (3,), (513, 7)]
        self.params = [draw(*shape).requires_grad_() for shape in shapes]
        names = [f"domain{k}" for k in range(num_domains)]
        self.directions = {name: [draw(*shape) for shape in shapes] for name in names}
        self.optimizer = DoGEOptimizer(adamw(self.params, device), domains=names, mu=1.0)

    def turn(self) -> None:
        """Change the gradients of the next step, in their memory."""
        for directions in self.directions.values():
            torch._foreach_mul_(directions, -1.25)

    def __call__(self) -> None:
        """One step."""
        for name, directions in self.directions.items():
            with self.optimizer.domain(name):
                torch.autograd.backward(self.params, directions)
        self.optimizer.step()
        self.optimizer.zero_grad()
