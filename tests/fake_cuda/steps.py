"""Steps on the fake device beside a twin on the CPU; tests/method/test_fake_cuda.py starts them."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks import models, protocol, steps
from benchmarks.models import Shape
from benchmarks.predicted import rows_traffic
from doge_fast import DoGEOptimizer, flat_buffer
from doge_fast.distributed import exchange
from doge_fast.losses import domain_losses, linear_domain_losses
from doge_fast.weights.aligned import Aligned
from doge_fast.weights.reweight import MirrorStep
from tests import fake_cuda, gpu_steps
from tests.dispatched import Dispatched
from tests.method.architectures import VOCABULARY, Tiny

LENGTH, STEPS = 8, 4
SIZES = {"a": 1, "b": 3, "c": 2}


def train(
    device: str,
    mode: str = "sequential",
    micro_batches: int = 1,
    kind: str = "",
    *,
    keep_rows: bool = True,
    **options: Any,
) -> tuple[list[str], list[Tensor]]:
    """What the host waited for after warm-up, and weights and parameters in the end."""
    # Two examples of each domain at least, one for each half.
    sizes_here = SIZES if keep_rows else {name: 2 * size for name, size in SIZES.items()}
    torch.manual_seed(0)
    model = Tiny(tied=True).to(device)
    named = list(model.named_parameters())
    halves = [named[:2], named[2:]] if kind == "two optimizers" else [named]
    inner = [torch.optim.AdamW(half, lr=1e-2, fused=True) for half in halves]
    scaler = torch.amp.GradScaler(torch.device(device).type, 1024.0) if kind == "scaler" else None
    optimizer = DoGEOptimizer(
        inner if len(inner) > 1 else inner[0],
        domains=list(SIZES),
        micro_batches=micro_batches,
        scaler=scaler,
        **(options if "aligned" in options.values() else {"mu": 0.05, **options}),
    )
    scaled = (lambda loss: loss) if scaler is None else scaler.scale
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        draws = {
            name: torch.randint(VOCABULARY, (sizes_here.get(name, 2), LENGTH), generator=generator)
            for name in optimizer.names
        }
        tokens = {name: each.to(device) for name, each in draws.items()}
        whole = torch.cat(list(tokens.values()))
        fake_cuda.waits()
        for _ in range(micro_batches):
            if mode == "sequential":
                rows = [*optimizer.domains_of_step, *optimizer.names[len(SIZES) :]]
                for name in rows:
                    with optimizer.domain(name):
                        logits = model.head(model.hidden(tokens[name]))
                        sizes = {name: len(tokens[name])}
                        scaled(domain_losses(logits, tokens[name], sizes).sum()).backward()
                continue
            with optimizer.stacked(model, sizes_here, keep_rows=keep_rows):
                hidden, weight = model.hidden(whole), model.head.weight
                loss = (
                    domain_losses(model.head(hidden), whole, sizes_here)
                    if mode == "stacked"
                    else linear_domain_losses(hidden, weight, whole, sizes_here)
                )
                scaled(loss.sum()).backward()
                assert keep_rows or optimizer.buffer.read_blocks()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        found += fake_cuda.waits() if step >= 2 else []
    ends = [optimizer.alpha_mean, *(parameter.detach() for parameter in model.parameters())]
    return found, [each.cpu().to(torch.float64) for each in ends]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "stacked"},
        {"mode": "linear"},
        {"mode": "linear", "micro_batches": 2},
        {"micro_batches": 2, "buffer_dtype": torch.bfloat16},
        {"selection": ["up.weight", "down.weight"], "max_grad_norm": 0.1},
        {"target": {"a": 1.0, "x": 2.0}, "score": "published"},
        {"max_grad_norm": 0.1, "domain_max_grad_norm": 0.5, "smoothing": 0.1},
        {"kind": "scaler"},
        {"kind": "scaler", "mode": "stacked", "micro_batches": 2},
        {"domains_per_step": 2},
        {"kind": "two optimizers"},
        {"score": "aligned", "micro_batches": 2, "max_grad_norm": 0.1},
        {"score": "aligned", "mode": "linear", "micro_batches": 2},
        {"score": "aligned", "mode": "linear", "keep_rows": False, "kind": "scaler"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "plain",
)
def test_a_step_is_that_of_the_cpu_and_waits_for_nothing(options, monkeypatch):
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {})
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES_ELSEWHERE", 1)
    found, ends = train("cuda:1", **options)
    # Torch's GradScaler reads whether a step overflowed, once, whatever optimizer it steps.
    assert found == (["item"] * 2 if options.get("kind") == "scaler" else [])
    # AdamW divides small gradients by their size. Rows of 16 bits may round to another neighbour
    # where sums differ in their last bit, which moves a parameter further.
    atol = 4e-6 if "buffer_dtype" in options else 2e-6
    for mine, expected in zip(ends, train("cpu", **options)[1], strict=True):
        # Not NaN, as fresh memory is.
        torch.testing.assert_close(mine, expected, rtol=0, atol=atol)


def test_under_autocast_norms_of_a_stacked_pass_have_the_dtype_of_torch():
    """On a GPU another one than on a CPU."""
    norms = [nn.RMSNorm(4), nn.LayerNorm(4)]
    model = nn.Sequential(nn.Linear(4, 4), *norms).to("cuda:1")
    seen: list[torch.dtype] = []
    for norm in norms:
        norm.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    for context in (nullcontext(), optimizer.stacked(model, {"a": 1, "b": 2})):
        with context, torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.ones(3, 2, 4, device="cuda:1")).sum()
            if len(seen) > len(norms):
                loss.backward()
    assert seen[: len(norms)] == seen[len(norms) :]
    assert torch.float32 in seen


def peaks_of(problem: steps.Problem) -> list[int]:
    """Bytes on the device of a plain step and of one with domains."""
    peaks = []
    for side in (steps.PlainStep, steps.DogeStep):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = side(problem, "cuda:1")
        # AdamW's moments come after the first.
        step()
        step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del step
        protocol.release("cuda:1")
    return peaks


# A CPU has no product of 16 bits into float32, which stacked rows of bfloat16 would take.
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(steps.SEQUENTIAL, None), (steps.SEQUENTIAL, "bfloat16"), (steps.STACKED, None)],
)
def test_over_plain_training_a_step_holds_its_rows_and_about_a_gradient(mode, dtype):
    """By the peaks of the device's memory, which say what fits a card."""
    problem = steps.Problem(Shape(2, 1, 256, 4096, 16), 7, 7, mode=mode, buffer_dtype=dtype)
    plain, doge = peaks_of(problem)
    gradient = 4 * models.num_parameters(problem.shape)
    rows = 7 * gradient / (2 if dtype else 1)
    assert rows <= doge - plain <= rows + 1.1 * gradient


def test_rows_that_are_not_kept_are_those_of_tied_weights_and_of_one_layer(monkeypatch):
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES_ELSEWHERE", 1)
    shape = Shape(4, 1, 256, 512, 16)
    problem = steps.Problem(shape, 7, 14, mode=steps.STACKED, score="aligned", keep_rows=False)
    plain, doge = peaks_of(problem)
    gradient = 4 * models.num_parameters(shape)
    tied, layer = 4 * shape.vocab_size * shape.width, 4 * 4 * shape.width**2
    # Plain torch takes two copies of a block for its Gram matrix in a metric.
    assert doge - plain <= 14 * (tied + 3.1 * layer) + 1.1 * gradient
    # All rows are several times as much.
    assert 14 * gradient > 3 * (doge - plain)


def tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


@pytest.mark.parametrize("rule", [MirrorStep, Aligned])
def test_a_stacked_step_moves_the_bytes_of_the_model(rule):
    """Counted where operators are called; the model says what they cost on a GPU."""
    model = Tiny().to("cuda:1")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    score = {"score": "aligned"} if rule is Aligned else {}
    optimizer = DoGEOptimizer(inner, domains=list(SIZES), **score)
    ids = torch.arange(8 * LENGTH, device="cuda:1").view(8, LENGTH) % VOCABULARY
    sizes = dict.fromkeys(SIZES, 2)
    for _ in range(3):
        with Dispatched() as dispatched:
            with optimizer.stacked(model, sizes):
                domain_losses(model(ids[:6]), ids[:6], sizes).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    storages = {block.rows_BN.untyped_storage().data_ptr() for block in optimizer.buffer.blocks}
    counted: Counter[str] = Counter()
    for function, args, kwargs, _ in dispatched.calls:
        arguments = function._schema.arguments
        named = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        written = tensors_in([named.get(each.name) for each in arguments if each.is_write])
        name = function.overloadpacket.__name__
        counted[f"{name} reads"] += sum(x.nbytes for x in tensors_in(named)) - sum(
            x.nbytes for x in written
        )
        counted[f"{name} writes"] += sum(x.nbytes for x in written)
        counted["rows"] += sum(
            x.nbytes for x in written if x.untyped_storage().data_ptr() in storages
        )
    gradient = sum(p.nbytes for p in model.parameters())
    least = rows_traffic(rule, len(SIZES), row_bytes=gradient, gradient_bytes=gradient)
    coefficients = optimizer.last.coefficients.nbytes
    assert counted["rows"] == least["accumulate"].written
    if rule is Aligned:
        # One coefficient for both halves.
        read = counted["gram_and_sum reads"] - coefficients // 2
        assert read == least["gram"].read
        assert counted["gram_and_sum writes"] == least["gram"].written
        assert counted["_foreach_norm reads"] == least["weighted_sum"].read
        return
    assert counted["gram reads"] == least["gram"].read
    assert counted["weighted_sum reads"] - coefficients == least["weighted_sum"].read
    assert counted["weighted_sum writes"] == least["weighted_sum"].written


def read_on_the_host(gram: Tensor) -> Tensor:
    return gram * float(gram.isfinite().all())


def from_the_device_in_use(gram: Tensor) -> Tensor:
    return gram + torch.zeros((), device="cuda")


def outside_of_the_capture(gram: Tensor) -> Tensor:
    with fake_cuda.not_captured():
        return gram * 1.5


PROBLEM = steps.Problem(Shape(1, 2, 32, 64, 16), 3, 6)


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Torch's choice among its kernels does not ask a device of ours.
    name = "scaled_dot_product_attention"
    plain = torch.ops.aten._scaled_dot_product_attention_math
    monkeypatch.setattr(nn.functional, name, lambda *qkv, **options: plain(*qkv, **options)[0])
    yield
    torch.cuda.set_sync_debug_mode("default")
    fake_cuda.waits()


def plant(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    right = exchange.gram
    monkeypatch.setattr(exchange, "gram", lambda rows, **metric: fault(right(rows, **metric)))


@pytest.mark.parametrize("mode", steps.MODES)
def test_the_benchmarks_bars_hold(mode):
    problem = steps.Problem(**{**vars(PROBLEM), "mode": mode})
    assert steps.host_synchronisations(problem, "cuda:1") == "none"
    assert steps.captured_step_error("cuda:1") == 0.0


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_tests_for_gpus_hold(device):
    for check in gpu_steps.CHECKS:
        check(device)


@pytest.mark.parametrize("fault", [read_on_the_host, from_the_device_in_use])
def test_a_wait_and_a_mixed_device_are_noticed(fault, monkeypatch):
    plant(monkeypatch, fault)
    if fault is read_on_the_host:
        assert "item" in steps.host_synchronisations(PROBLEM, "cuda:1")
    else:
        with pytest.raises(RuntimeError, match="device"):
            steps.host_synchronisations(PROBLEM, "cuda:1")
    for watch in (
        steps.captured_step_error,
        gpu_steps.step_waits_for_nothing,
        gpu_steps.captured_step_is_the_step,
    ):
        with pytest.raises(RuntimeError, match=r"synchronizing|device"):
            watch("cuda:1")


def test_a_parameter_that_is_not_a_number_is_noticed(monkeypatch):
    right = exchange.weighted_sum

    def wrong(*args: Any, out: list[Tensor]) -> None:
        right(*args, out=out)
        out[-1].mul_(math.nan if torch.cuda.is_current_stream_capturing() else 1.0)

    monkeypatch.setattr(exchange, "weighted_sum", wrong)
    assert steps.captured_step_error("cuda:1") == math.inf


def test_what_a_graph_does_not_hold_is_noticed(monkeypatch):
    plant(monkeypatch, outside_of_the_capture)
    assert steps.captured_step_error("cuda:1") > 0
    with pytest.raises(AssertionError):
        gpu_steps.captured_step_is_the_step("cuda:1")


@pytest.mark.parametrize(("rule", "micro_batches"), [(MirrorStep, 1), (Aligned, 2)])
def test_a_rule_is_one_launch(rule, micro_batches, monkeypatch):
    """Beside it there is memory for the record, and there are views of it."""
    pytest.importorskip("triton")
    from triton.runtime.interpreter import GridExecutor

    fake_cuda.interpret_triton()
    monkeypatch.setenv("DOGE_FAST_BACKEND", "triton")
    run, step = GridExecutor.__call__, rule.step
    launches: list[str] = []
    seen: list[tuple[list[str], set[str]]] = []

    def watched_run(self: Any, *args: Any, **options: Any) -> None:
        launches.append(self.fn.__name__)
        with torch._C._DisableTorchDispatch():
            run(self, *args, **options)

    def watched_step(*args: Any) -> Any:
        launches.clear()
        with Dispatched() as dispatched:
            last = step(*args)
        others = [call[0] for call in dispatched.calls if call[0].namespace == "aten"]
        seen.append((launches[:], {each.overloadpacket.__name__ for each in others}))
        return last

    monkeypatch.setattr(GridExecutor, "__call__", watched_run)
    monkeypatch.setattr(rule, "step", watched_step)
    score = {"score": "aligned"} if rule is Aligned else {}
    assert train("cuda:1", micro_batches=micro_batches, **score)[0] == []
    kernel = "align_once" if rule is Aligned else "reweight_once"
    views = {"view", "unbind", "slice", "split_with_sizes", "detach"}
    for of_step, others in seen:
        assert of_step == [kernel]
        assert others <= {"empty", *views}


def test_a_launch_on_another_device_is_noticed(monkeypatch):
    pytest.importorskip("triton")
    fake_cuda.interpret_triton()
    monkeypatch.setenv("DOGE_FAST_BACKEND", "triton")
    for mode in ("sequential", "linear"):
        assert train("cuda:1", mode)[0] == []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(RuntimeError, match="launched on"):
        train("cuda:1")
