"""A DoGE step against what one would do instead, on the same model and the same tokens.

    python -m benchmarks.peers
    python -m benchmarks.peers --json results.json

Each way computes the Gram matrix of the domain gradients, moves the domain weights, puts the
weighted gradient into `p.grad` and steps AdamW. Its Gram matrix and its gradient are compared
with float64; its time is paired with that of plain training; its memory is measured in a process
of its own. What cannot run is a row with the reason. A second plain step over plain training says
how far two equal steps lie apart in the same run; a ratio that is as near to 1 is noise.
"""

import argparse
import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import memory, models, protocol, steps
from benchmarks.models import PAPER, Shape
from benchmarks.protocol import paired
from benchmarks.steps import LEARNING_RATE, DogeStep, PlainStep, Problem
from doge_fast import reference

MU = 1.0
CPU_PROBLEM = Problem(Shape(4, 4, 256, 4096, 128), 7, 7)
Row = dict[str, Any]


class Outcome(NamedTuple):
    """What a way to do it found, its gradient being in `p.grad`."""

    gram_KK: Tensor | None
    """None: it does not tell."""
    alpha_K: Tensor
    """The weights of its gradient."""


class Peer(PlainStep):
    """A step in two halves, so that the first can be compared with the truth."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        self.params = list(self.model.parameters())
        self.alpha_K = torch.full(
            (problem.num_domains,), 1 / problem.num_domains, dtype=torch.float64, device=device
        )

    def combine(self) -> Outcome:
        """From tokens to `p.grad`."""
        raise NotImplementedError

    def __call__(self) -> None:
        """One step."""
        self.combine()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def move(self, gram_KK: Tensor) -> Tensor:
        """The mirror step of the paper, universal; new weights, float64."""
        gain_K = gram_KK.double().sum(1)
        self.alpha_K = torch.softmax(self.alpha_K.log() + LEARNING_RATE / MU * gain_K, dim=0)
        return self.alpha_K


class Ours(Peer):
    """doge_fast, sequential."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.doge = DogeStep(problem, device)
        self.model, self.params = self.doge.model, list(self.doge.model.parameters())

    def combine(self) -> Outcome:
        """One backward a domain, then the optimizer's passes."""
        self.doge.backward()
        self.doge.optimizer.combine()
        last = self.doge.optimizer.last
        assert last is not None
        return Outcome(last.gram, last.alpha)

    def __call__(self) -> None:
        """One step."""
        self.doge()


class OursStacked(Ours):
    """doge_fast, one forward and one backward for all domains."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(dataclasses.replace(problem, mode=steps.STACKED), device)


class Flatten(Peer):
    """One backward per domain, gradients flattened to a matrix on the device, torch.mm."""

    def combine(self) -> Outcome:
        """As one writes it in ten lines."""
        rows = []
        for tokens in self.data.values():
            self.loss(tokens).backward()
            rows.append(torch.cat([param.grad.flatten() for param in self.params]))  # type: ignore[union-attr]
            self.optimizer.zero_grad()
        grads_KN = torch.stack(rows)
        gram_KK = torch.mm(grads_KN, grads_KN.T)
        alpha_K = self.move(gram_KK)
        combined_N = alpha_K.to(grads_KN.dtype) @ grads_KN
        pieces = combined_N.split([param.numel() for param in self.params])
        for param, piece in zip(self.params, pieces, strict=True):
            param.grad = piece.view_as(param)
        return Outcome(gram_KK, alpha_K)


class Vmap(Peer):
    """torch.func: vmap of grad over the domains."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        if problem.num_sequences % problem.num_domains:
            raise ValueError(
                f"vmap needs equal domains; {problem.num_sequences} sequences do not go into "
                f"{problem.num_domains}."
            )
        self.tokens_KBL = torch.stack(list(self.data.values()))
        self.grads = torch.func.vmap(torch.func.grad(self._loss), in_dims=(None, 0))

    def combine(self) -> Outcome:
        """All domains in one call."""
        names = [name for name, _ in self.model.named_parameters()]
        values = dict(zip(names, (param.detach() for param in self.params), strict=True))
        with warnings.catch_warnings():
            # Attention has no batching rule and says so.
            warnings.simplefilter("ignore")
            grads = self.grads(values, self.tokens_KBL)
        flat = [grads[name].flatten(1) for name in names]
        gram_KK = sum((each @ each.T).double() for each in flat)
        assert isinstance(gram_KK, Tensor)
        alpha_K = self.move(gram_KK)
        for param, grads_KN in zip(self.params, flat, strict=True):
            param.grad = (alpha_K.to(grads_KN.dtype) @ grads_KN).view_as(param)
        return Outcome(gram_KK, alpha_K)

    def _loss(self, values: dict[str, Tensor], tokens: Tensor) -> Tensor:
        def called(tokens: Tensor) -> Tensor:
            logits: Tensor = torch.func.functional_call(self.model, values, (tokens,))
            return logits

        return models.loss_of(called, tokens, self.problem.autocast_dtype)  # type: ignore[arg-type]


class CompiledVmap(Vmap):
    """The same, with the gradients of all domains compiled into one graph."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        self.grads = torch.compile(self.grads)


class Autojac(Peer):
    """TorchJD: the Jacobian of the domain losses, combined by weights from its Gramian."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        from torchjd.aggregation import GramianWeightedAggregator, Weighting

        peer = self

        class DogeWeighting(Weighting):  # type: ignore[type-arg, misc]
            """The mirror step; keeps the Gramian that it was given."""

            def forward(self, stat: Tensor, /) -> Tensor:
                peer.gram_KK = stat
                return peer.move(stat).to(stat.dtype)

        self.gram_KK: Tensor | None = None
        self.aggregator = GramianWeightedAggregator(DogeWeighting())

    def combine(self) -> Outcome:
        """K forwards, then one Jacobian."""
        from torchjd.autojac import backward, jac_to_grad

        losses = [self.loss(tokens) for tokens in self.data.values()]
        # One row at a time: all at once would vmap over every domain's graph.
        backward(losses, inputs=self.params, parallel_chunk_size=1)
        jac_to_grad(self.params, self.aggregator, optimize_gramian_computation=True)
        return Outcome(self.gram_KK, self.alpha_K)


class Autogram(Peer):
    """TorchJD: the Gramian from a pass over the layers, then a backward of the weighted losses."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        from torchjd.autogram import Engine

        self.engine = Engine(self.model, batch_dim=0)
        self.tokens = torch.cat(list(self.data.values()))
        counts = torch.tensor([len(tokens) for tokens in self.data.values()])
        owner_B = torch.arange(problem.num_domains).repeat_interleave(counts)
        # [K, B]: a domain's loss is the mean of its sequences'.
        self.means_KB = (nn.functional.one_hot(owner_B).T / counts[:, None]).to(device)

    def combine(self) -> Outcome:
        """One forward, the Gramian of the sequences folded to domains, one backward."""
        with models.mixed_precision(self.tokens.device, self.problem.autocast_dtype):
            losses_B = models.token_losses(self.model, self.tokens)
        gram_BB = self.engine.compute_gramian(losses_B)
        gram_KK = self.means_KB @ gram_BB.to(self.means_KB.dtype) @ self.means_KB.T
        alpha_K = self.move(gram_KK)
        (alpha_K.to(losses_B.dtype) @ (self.means_KB.to(losses_B.dtype) @ losses_B)).backward()
        return Outcome(gram_KK, alpha_K)


PLAIN = "plain training"
PEERS: dict[str, Callable[..., PlainStep]] = {
    PLAIN: PlainStep,
    "doge_fast": Ours,
    "doge_fast, stacked": OursStacked,
    "flatten, torch.mm": Flatten,
    "torch.func.vmap": Vmap,
    "vmap, compiled": CompiledVmap,
    "TorchJD autojac": Autojac,
    "TorchJD autogram": Autogram,
}


def make(name: str, problem: dict[str, Any], device: str) -> PlainStep:
    """What `memory.peak_bytes` names."""
    return PEERS[name](Problem.from_dict(problem), device)


def unavailable_reason(name: str) -> str | None:
    """Why a peer cannot be asked at all."""
    if name.startswith("TorchJD") and importlib.util.find_spec("torchjd") is None:
        return "the package torchjd is not installed"
    return None


class Truth:
    """Domain gradients of the same model in float64, one backward each."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        model = models.build(problem.shape, device).double()
        params = list(model.parameters())
        rows = []
        for tokens in steps.batches(problem, device).values():
            grads = torch.autograd.grad(models.loss_of(model, tokens), params)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        self.rows_KN = torch.stack(rows)
        self.gram_KK = reference.gram(self.rows_KN)

    def errors(self, outcome: Outcome, params: Sequence[Tensor]) -> Row:
        """Of the Gram matrix over its largest entry; of the gradient, in norm, over its norm."""
        found: Row = {"gram_error": None}
        if outcome.gram_KK is not None:
            gram_KK = outcome.gram_KK.to(self.gram_KK)
            worst = (gram_KK - self.gram_KK).abs().max() / self.gram_KK.abs().max()
            found["gram_error"] = protocol.rounded(float(worst), 2)
        exact_N = reference.weighted_sum(self.rows_KN, outcome.alpha_K.to(self.rows_KN))
        combined_N = torch.cat([param.grad.flatten().double() for param in params])  # type: ignore[union-attr]
        distance = (combined_N - exact_N).norm() / exact_N.norm()
        return found | {"gradient_error": protocol.rounded(float(distance), 2)}


def measure(
    problem: Problem,
    device: torch.device | str,
    *,
    names: Sequence[str] = tuple(PEERS),
    pairs: int = 9,
    seconds: float = float("inf"),
    with_memory: bool = True,
) -> list[Row]:
    """A row per peer: time over plain training, memory over it, errors; or the reason."""
    truth = Truth(problem, device)
    plain_peak = _peak(PLAIN, problem, device) if with_memory else None
    rows = []
    for name in names:
        row: Row = {"peer": name}
        reason = unavailable_reason(name)
        if reason is None:
            try:
                row |= _measured(name, problem, device, truth, pairs, seconds)
                if plain_peak is not None:
                    peak = plain_peak if name == PLAIN else _peak(name, problem, device)
                    row["extra_bytes"] = peak - plain_peak
            except Exception as failure:
                said = str(failure).strip().splitlines() or [""]
                reason = f"{type(failure).__name__}: {said[0]}"
        if reason is not None:
            row["reason"] = reason
        rows.append(row)
    return rows


def noise(rows: Sequence[Row]) -> float:
    """How far the quartiles of a second plain step over plain training lie from 1."""
    plain = next((row for row in rows if row["peer"] == PLAIN and "ratio" in row), None)
    return 0.0 if plain is None else max(abs(plain["low"] - 1), abs(plain["high"] - 1))


def _measured(
    name: str,
    problem: Problem,
    device: torch.device | str,
    truth: Truth,
    pairs: int,
    seconds: float,
) -> Row:
    row: Row = {}
    step = PEERS[name](problem, device)
    if isinstance(step, Peer):
        row |= truth.errors(step.combine(), step.params)
        del step
        step = PEERS[name](problem, device)
    plain = PlainStep(problem, device)
    ratio = paired(step, plain, pairs=pairs, device=device, seconds=seconds)
    return row | protocol.as_dict(ratio)


def _peak(name: str, problem: Problem, device: torch.device | str) -> int:
    arguments = steps.arguments_of(name, problem)
    return memory.peak_bytes("benchmarks.peers:make", arguments, device)


def table(rows: Sequence[Row], problem: Problem) -> str:
    """For people, in 100 columns."""
    buffer = problem.num_domains * models.num_parameters(problem.shape) * 4
    lines = [
        str(problem),
        f"K x N in float32: {buffer / 1e6:.0f} MB",
        f"{'':<20}{'step / plain':<26}{'MB over plain':>14}{'Gram error':>13}"
        f"{'gradient error':>16}",
    ]
    for row in rows:
        if "reason" in row:
            lines.append(f"{row['peer']:<20}{row['reason']}"[:100])
            continue
        time = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        time += " noise" if abs(row["ratio"] - 1) <= noise(rows) else ""
        extra = f"{row['extra_bytes'] / 1e6:+.0f}" if "extra_bytes" in row else ""
        lines.append(
            f"{row['peer']:<20}{time:<26}{extra:>14}{_error(row.get('gram_error')):>13}"
            f"{_error(row.get('gradient_error')):>16}"
        )
    return "\n".join(lines)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--model", choices=PAPER, help="a size of the paper")
    parser.add_argument("--domains", type=int, default=7, help="K")
    parser.add_argument("--sequences", type=int, default=7, help="per step, of all domains")
    parser.add_argument("--autocast", help="a dtype of torch, as bfloat16")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, per peer")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(arguments)
    shape = PAPER[args.model] if args.model else CPU_PROBLEM.shape
    problem = Problem(shape, args.domains, args.sequences, autocast=args.autocast)
    rows = measure(
        problem,
        args.device,
        names=args.peers,
        pairs=args.pairs,
        seconds=args.seconds,
        with_memory=not args.no_memory,
    )
    print(table(rows, problem))
    if args.json:
        record = {"benchmark": "peers", **protocol.machine(args.device), "problem": str(problem)}
        versions = {"torchjd": protocol.package_version("torchjd")}
        protocol.write(args.json, {**record, **versions, "rows": rows})


if __name__ == "__main__":
    main()
