"""The GPU script on cards of 40 and 80 GB, pretended; tests/method/test_fake_cuda.py starts it.

Lengths of a model (width, vocabulary, sequence) are `SCALE` times shorter than the paper's, so
parameters, rows, activations and logits take `SCALE`**2 times less memory, and so has the device.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import models, optimizer_step, protocol, steps
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bars, job, times
from benchmarks.gpu.session import Row, Session
from benchmarks.models import PAPER, Shape
from doge_fast import losses
from doge_fast.alternation import Call, Ratio, ratio_of
from doge_fast.stacked.layers import linear
from tests import fake_cuda

SCALE = 32
# Assumed to be free on an A100 beside the driver's own half of a GB.
FREE_BYTES = {40: 39 << 30, 80: 78 << 30}


def scaled(shape: Shape) -> Shape:
    """With one head: attention keeps nothing that grows with their number."""
    lengths = [round(each / SCALE) for each in (shape.width, shape.vocab_size, shape.sequence)]
    return Shape(shape.num_layers, 1, *lengths)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Keeps no [L, L] for the backward pass, as a GPU's kernel."""
    plain = torch.ops.aten._scaled_dot_product_attention_math
    call = functools.partial(plain, **options)
    # Torch's choice among its kernels does not ask a device of ours.
    return checkpoint(call, query, key, value, use_reentrant=False, preserve_rng_state=False)[0]


def wide_product(out: Tensor, left: Tensor, right: Tensor, adds: bool) -> None:
    """float32 of 16-bit factors, without a temporary on the device; a CPU has no such product."""
    result, *factors = map(torch.ops.fake_cuda.host, (out, left, right))
    product = torch.bmm(*[each.float() for each in factors])
    result.copy_(result + product if adds else product)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(times, "PAPER", {name: scaled(shape) for name, shape in PAPER.items()})
    limits = [
        (models, "MOST_LOGITS_BYTES"),
        (linear, "MOST_TEMPORARY_BYTES"),
        (losses, "CHUNK_BYTES_ELSEWHERE"),
    ]
    for module, limit in limits:
        monkeypatch.setattr(module, limit, getattr(module, limit) // SCALE**2)
    # Plain torch makes float32 copies of the logits, which Triton's kernel changes in place.
    monkeypatch.setattr(losses, "CHUNK_BYTES_ELSEWHERE", losses.CHUNK_BYTES_ELSEWHERE // 4)
    monkeypatch.setattr(linear, "multiply_wide", wide_product)
    # Sums of so few terms are less exact in bfloat16 than the check allows.
    monkeypatch.setattr(steps, "check", lambda *_: 0.0)
    monkeypatch.setattr(optimizer_step, "paired", run_both)
    # Their own test is beside this one.
    monkeypatch.setattr(steps, "host_synchronisations", lambda *_: bars.NO_WAIT)


def run_both(variant: Call, baseline: Call, **options: object) -> Ratio:
    """The DoGE step twice, since AdamW's moments come after the first."""
    for side in (baseline, variant, variant):
        side()
    return ratio_of([1.0], [1.0])


# What has fitted a card of 40 GB fits one of 80.
measure_once = functools.cache(optimizer_step.measure)


@pytest.mark.parametrize(
    ("gigabytes", "skipped"),
    [
        (40, {("684M", steps.SEQUENTIAL), ("210M", steps.STACKED), ("684M", steps.STACKED)}),
        (80, {("684M", steps.STACKED)}),
    ],
)
def test_steps_and_sizes(gigabytes, skipped, monkeypatch):
    session = Session(torch.device("cuda", 0), quick=False)
    monkeypatch.setattr(optimizer_step, "measure", measure_once)
    # Of more domains a walk takes long, and the batch is the same.
    monkeypatch.setattr(times, "STEP_ROWS", (7,))
    sections: dict[str, Row] = {}
    with fake_cuda.memory_of(FREE_BYTES[gigabytes] // SCALE**2):
        assert torch.cuda.mem_get_info() == 2 * (FREE_BYTES[gigabytes] // SCALE**2,)
        for part in ("steps", "sizes"):
            sections |= gpu.run_part(part, session, minutes=60.0)
    rows = [*sections["steps"]["rows"], *sections["sizes"]["rows"]]
    aligned = len(times.FIRST_SIZES) * len(times.ALIGNED_KINDS)
    assert len(rows) == len(PAPER) * len(steps.MODES) + aligned
    reasons = {(row["model"], row["mode"]): row["skipped"] for row in rows if "skipped" in row}
    assert set(reasons) == skipped
    assert all("out of memory" in reason for reason in reasons.values())
    # Nothing that found no room is wrong, and what found it is judged.
    assert bars.is_correct(sections)
    verdicts = {each["bar"]: each["verdict"] for each in bars.bars(sections, on_gpu=True)}
    judged = [verdict for bar, verdict in verdicts.items() if "K = 7:" in bar]
    assert judged == [bars.MET, bars.MET]


def test_fifty_domains_fit_40_gigabytes(monkeypatch):
    """Of the two sizes that are asked first the larger one, with rows in bfloat16."""
    session = Session(torch.device("cuda", 0), quick=False)
    monkeypatch.setattr(times, "STEP_ROWS", (50,))
    monkeypatch.setattr(times, "FIRST_SIZES", ("124M",))
    with fake_cuda.memory_of(FREE_BYTES[40] // SCALE**2):
        sections = gpu.run_part("steps", session, minutes=60.0)
    assert bars.is_correct(sections)
    rows = [row for row in sections["steps"]["rows"] if row["mode"] in steps.MODES]
    assert [row["mode"] for row in rows if "ratio" in row] == list(steps.MODES)
    assert all("rows in bfloat16" in row["problem"] for row in rows)


@pytest.mark.parametrize(("gigabytes", "sequences"), [(40, 9), (80, 18)])
def test_the_job(gigabytes, sequences):
    session = Session(torch.device("cuda", 0), quick=False)
    with fake_cuda.memory_of(FREE_BYTES[gigabytes]):
        assert job.sequences_of(session, 7) == sequences

    def train(side: type[steps.PlainStep], num_domains: int, sequences: int) -> None:
        protocol.release(session.device)
        problem = steps.Problem(times.PAPER["82M"], num_domains, 7 * sequences, autocast="bfloat16")
        step = side(problem, session.device)
        step()
        step()

    with fake_cuda.memory_of(FREE_BYTES[gigabytes] // SCALE**2):
        train(steps.DogeStep, 7, sequences)
        # Plain training takes all tokens at once, with all their logits.
        train(steps.PlainStep, 1, sequences)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            train(steps.PlainStep, 1, 2 * sequences)
    protocol.release(session.device)
