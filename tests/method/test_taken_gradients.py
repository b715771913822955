"""Where a gradient is taken when its domain is left, and not in the middle of a backward pass."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import doge_fast
from doge_fast import DoGEOptimizer
from doge_fast.kernels import fill
from doge_fast.step import parameters
from tests.models import domain_tokens, tied_transformer

ROOT = Path(doge_fast.__file__).resolve().parents[1]
FOLDERS = (str(ROOT / "doge_fast"), str(ROOT / "kernels"))


def optimizer_of(model: nn.Module, **options: object) -> DoGEOptimizer:
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    return DoGEOptimizer(inner, domains=["a", "b"], mu=0.1, micro_batches=None, **options)


def biases(number: int, device: str) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(3, device=device)) for _ in range(number))


class Counts(TorchDispatchMode):
    """Counts calls of our Python functions outside of what torch dispatches."""

    def __enter__(self) -> "Counts":
        super().__enter__()
        self.ours, self._is_inside = 0, False
        # Also on the thread that autograd runs hooks on, which is this one for meta.
        sys.setprofile(self._count_call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # On meta operators are Python functions, on a GPU none is.
        self._is_inside = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._is_inside = False

    def _count_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not self._is_inside:
            self.ours += frame.f_code.co_filename.startswith(FOLDERS)


def test_on_a_gpu_no_python_runs_per_parameter():
    """What a GPU would wait for; without values, since only the calls count."""
    counts = []
    for number in (5, 50):
        params = biases(number, "meta")
        optimizer = optimizer_of(params)
        for name in "ab":
            with Counts() as count, optimizer.domain(name):
                torch.autograd.backward(list(params), [torch.ones_like(p) for p in params])
        counts.append(count.ours)
    assert counts[0] == counts[1] > 0


def test_on_a_cpu_gradients_are_taken_one_by_one_and_elsewhere_together():
    near, far = biases(2, "cpu"), biases(2, "meta")
    optimizer = optimizer_of(nn.ModuleList([near, far]))
    for name in "ab":
        with optimizer.domain(name):
            near[0].sum().backward()
            far[0].sum().backward()
            assert near[0].grad is None
            assert far[0].grad is not None
        assert far[0].grad is None
    assert [block.param.device.type for block in optimizer.buffer.blocks] == ["cpu", "meta"]
    assert all(block.written == 3 for block in optimizer.buffer.blocks)


def test_taking_gradients_early_or_late_gives_the_same_bits(monkeypatch):
    after = []
    for at_once in (True, False):
        monkeypatch.setattr(parameters, "takes_at_once", lambda param, at=at_once: at)
        model = tied_transformer()
        optimizer = optimizer_of(model, target={"a": 1.0, "x": 2.0})
        for step in range(3):
            # Once more: the second pass of a domain adds up.
            for row, name in enumerate("abxa"):
                with optimizer.domain(name):
                    model(domain_tokens(row, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after.append([*(p.detach() for p in model.parameters()), optimizer.alpha])
    for one, other in zip(*after, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_of_the_user_runs_before_the_gradient_is_taken(is_first):
    """Whenever it was registered; a stacked pass would run none."""

    def double(param: torch.Tensor) -> None:
        param.grad *= 2

    model = nn.Linear(3, 1, bias=False)
    if is_first:
        model.weight.register_post_accumulate_grad_hook(double)
    optimizer = optimizer_of(model, domain_max_grad_norm=None)
    if not is_first:
        model.weight.register_post_accumulate_grad_hook(double)
    for _ in range(2):
        for name in ("a", "b"):
            with optimizer.domain(name):
                model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last.grad_norms.square().tolist() == pytest.approx([12, 12])
    with pytest.raises(RuntimeError, match="no post-accumulate hook"):
        optimizer.stacked(model, {"a": 1, "b": 1}).__enter__()
    # Those of another DoGEOptimizer are none: it may be forgotten, or take turns.
    model = nn.Linear(3, 1, bias=False)
    optimizer, _other = optimizer_of(model), optimizer_of(model)
    with optimizer.stacked(model, {"a": 1, "b": 1}):
        model(torch.ones(2, 3)).sum().backward()


def test_backward_passes_inside_one_domain_add_up_in_the_dtype_of_the_parameter(taken_late):
    """Those of several domain blocks in the buffer's."""
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = optimizer_of(nn.ParameterList([param]), buffer_dtype=torch.float32)
    with optimizer.domain("a"):
        for factor in (256.0, 1.0):
            (factor * param).sum().backward()
    for factor in (256.0, 1.0):
        with optimizer.domain("b"):
            (factor * param).sum().backward()
    (block,) = optimizer.buffer.blocks
    assert block.rows_BN.flatten().tolist() == [256.0, 257.0]


@pytest.mark.usefixtures("taken")
def test_a_stacked_pass_leaves_no_gradient_and_refuses_that_of_the_whole_batch():
    model = nn.ModuleDict({"layer": nn.Linear(4, 4), "other": nn.Linear(4, 4, bias=False)})
    optimizer = optimizer_of(model)

    def run(*, is_outside: bool) -> None:
        with optimizer.stacked(model, {"a": 2, "b": 2}):
            hidden = model["layer"](torch.randn(4, 4))
            # Past the forward of the module that owns the weight.
            outputs = hidden @ model["other"].weight if is_outside else hidden
            outputs.square().sum().backward()
            assert model["layer"].weight.grad is None

    with pytest.raises(RuntimeError, match=r"other\.weight received a gradient of the whole batch"):
        run(is_outside=True)
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match="dropped"):
        optimizer.step()
    optimizer.zero_grad()
    run(is_outside=False)
    optimizer.step()


def test_fake_tensors_go_through_the_operator(monkeypatch):
    # An implementation that is looked up would raise a TypeError.
    monkeypatch.setattr(sys.modules["doge_fast.kernels.accumulate"], "runs", None)
    with FakeTensorMode():
        grads, rows = ([torch.ones(3)] for _ in range(2))
        fill(grads, rows, add=True)
