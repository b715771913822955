"""A step asks the host for nothing: it runs on tensors that have no values to ask for."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from doge_fast import DoGEOptimizer
from doge_fast.distributed import exchange
from doge_fast.joined import JoinedOptimizer
from doge_fast.step import step
from doge_fast.step.step import _matrices
from doge_fast.wrapper import _needing_the_host, skip_reader, step_unless
from tests.dispatched import Dispatched
from tests.models import Bounded, enter


class FusedSGD(torch.optim.SGD):
    """Takes the flag of a skipped step on the device, as torch's fused optimizers do."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, params: Any, lr: float | Tensor) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group |= {"lr": lr, "fused": True}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                moved = param.detach() - group["lr"] * param.grad
                param.detach().copy_(torch.where(self.found_inf == 0, moved, param))


UNCUT = {"domain_max_grad_norm": None}


def run(optimizer_of: Any, lr: float | Tensor = 0.1, grad_scale: Any = 1.0, **options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to("meta")
    optimizer = DoGEOptimizer(
        optimizer_of(model.named_parameters(), lr=lr),
        domains=["a", "b"],
        target={"a": 1.0, "x": 2.0},
        micro_batches=None,
        **(options if "aligned" in options.values() else {"mu": 0.01, **UNCUT, **options}),
    )
    for _ in range(2):
        enter(
            optimizer, "aabbxx", lambda _: model(torch.empty(4, 8, device="meta")).square().mean()
        )
        optimizer.combine(grad_scale=grad_scale)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"score": "published", "domain_max_grad_norm": 1.0, "smoothing": 0.1},
        {"selection": ["0.weight"], "max_grad_norm": 1.0},
        {"selection": ["0.weight"], "domain_max_grad_norm": 1.0},
        {"score": "published", "selection": ["0.weight"]},
        {"score": Bounded(0.0, 1.0)},
        {"score": "aligned"},
        {"score": "aligned", "selection": ["0.weight"], "max_grad_norm": 1.0},
        {"lr": torch.empty((), device="meta")},
        {"grad_scale": torch.empty((), device="meta")},
        {"buffer_dtype": torch.bfloat16},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_step_needs_no_value(options):
    optimizer = run(FusedSGD, **options)
    assert optimizer.last.alpha.is_meta
    assert optimizer.last.skipped.is_meta


@pytest.mark.parametrize("other", ["cpu", "meta"])
def test_parameters_of_a_selection_may_be_on_another_device(other):
    """The Gram matrix of the others is brought to theirs."""
    others, selected = (torch.zeros(2, 2, device=device) for device in (other, "meta"))
    grams = _matrices([(True, selected), (False, others)], torch.device("meta"))
    assert [gram_CC.device.type for gram_CC in grams] == ["meta", "meta"]


def halves(first: Any, second: Any) -> Any:
    """A layer for each of two optimizers."""

    def build(params: Any, lr: float) -> list[torch.optim.Optimizer]:
        named = list(params)
        return [first(named[:2], lr=lr), second(named[2:], lr=lr)]

    return build


def test_several_optimizers_that_are_fused_need_no_value():
    optimizer = run(halves(FusedSGD, FusedSGD))
    assert not any(hasattr(each, "found_inf") for each in optimizer.inner.optimizers)


@pytest.mark.parametrize("kinds", [(FusedSGD, torch.optim.SGD), (torch.optim.SGD, FusedSGD)])
def test_one_optimizer_that_is_not_fused_needs_the_flag_on_the_host(kinds, gpu, monkeypatch):
    """The check above sees a read: this one asks whether the step is skipped."""
    for build in (torch.optim.SGD, halves(*kinds)):
        with pytest.raises(RuntimeError, match="meta tensor"):
            run(build)
    inner = JoinedOptimizer([kind([torch.zeros(1, requires_grad=True)], lr=0.1) for kind in kinds])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="; SGD needs"):
        step_unless(gpu.flag, torch.zeros(()), inner, lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """A flag and a stream of a GPU; its calls are what the host has asked, in their order."""
    gpu = mock.MagicMock()
    gpu.flag.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream)
    return gpu


NOT_FUSED = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize("value", [True, False])
def test_the_host_waits_for_the_flag_alone(gpu, value):
    gpu.flag.to.return_value = torch.tensor(value)
    read = skip_reader(gpu.flag, NOT_FUSED)
    gpu.weighted_sum()
    assert read() is value
    copy, event = mock.call.flag.to("cpu", non_blocking=True), mock.call.stream.record_event()
    assert gpu.mock_calls == [copy, event, mock.call.weighted_sum(), event.synchronize()]


def test_the_flag_is_not_copied_for_fused_optimizers_or_in_a_capture(gpu, monkeypatch):
    """For an optimizer that skips on the device, and in a capture."""
    fused = FusedSGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    read = skip_reader(gpu.flag, fused)
    assert gpu.mock_calls == []
    assert read()
    assert gpu.mock_calls == [mock.call.flag.__bool__()]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    skip_reader(gpu.flag, NOT_FUSED)
    assert len(gpu.mock_calls) == 1


@pytest.mark.parametrize("selection", [None, ["0.weight"]])
def test_the_flag_is_copied_before_the_weighted_sum(monkeypatch, selection):
    """Right after the K x K step, before the weighted sum."""
    spied = mock.Mock()
    for place, name in ((step, "skip_reader"), (exchange, "weighted_sum")):
        spied.attach_mock(mock.Mock(wraps=getattr(place, name)), name)
        monkeypatch.setattr(place, name, getattr(spied, name))
    optimizer = run(FusedSGD, max_grad_norm=1.0, selection=selection)
    assert [name for name, *_ in spied.mock_calls] == 2 * ["skip_reader", "weighted_sum"]
    flags = [call.args[0] for call in spied.skip_reader.call_args_list]
    assert any(flag is optimizer.last.skipped for flag in flags)


class Recorded(Dispatched):
    """A step as a CUDA graph has it: operators on fixed memory, to be run again in their order.

    The operators' results keep their memory from one replay to the next.
    """

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    # A matrix product removes dimensions of its result in place.
                    old.copy_(new.view_as(old))


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


@pytest.mark.parametrize(
    "options",
    [
        {"absent": "keep"},
        {"absent": "keep", "domains_per_step": 2, "seed": 1},
        {"absent": "keep", "max_grad_norm": 0.1, "smoothing": 0.1, "score": "published"},
    ],
    ids=["plain", "drawn", "settings"],
)
def test_a_captured_step_sees_later_settings(options):
    """Domains come and go, and `mu`, the rate and the loaded state change, at one address each.

    Rows and the combined gradient stay at theirs.
    """
    optimizers = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        inner = FusedSGD(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(
            inner, domains=["a", "b", "c"], mu=0.1, micro_batches=None, **options
        )
        optimizers.append((model, optimizer))
    (_, captured), (twin_model, twin) = optimizers

    def fill(skip: str) -> None:
        for model, optimizer in optimizers:
            for row, name in enumerate(optimizer.domains_of_step):
                if name not in skip:
                    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(row))
                    with optimizer.domain(name):
                        model(batch).square().mean().backward()

    def eager(skip: str) -> None:
        fill(skip)
        for _, optimizer in optimizers:
            optimizer.combine()
            optimizer.zero_grad()

    eager("")
    fill("")
    domains = captured.domains_of_step
    with Recorded() as graph:
        captured.combine()
    twin.combine()
    for _, optimizer in optimizers:
        optimizer.zero_grad()

    # What the graph reads is another from here on.
    state = twin.state_dict()
    for _, optimizer in optimizers:
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.2
        # Two of the three domains, which are others than those of the graph.
        optimizer._step.subset.draw(1)
    assert (captured.domains_of_step != domains) == ("domains_per_step" in options)
    skip = captured.domains_of_step[0]
    eager(skip)
    fill(skip)
    twin.combine()
    # On a CPU rows that are absent are zeroed on the host's word, as the eager step has done.
    blocks = captured.buffer.touched(captured._step.parameters.params)
    graph.replay()
    assert torch.equal(captured.alpha, twin.alpha)
    assert captured.num_steps == twin.num_steps
    for block, param in zip(blocks, twin_model.parameters(), strict=True):
        assert torch.equal(block.gradient(), param.grad)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.filterwarnings("error")
def test_a_captured_step_uses_the_rate_of_each_replay(lr):
    """The host has seen the rate of one step of a hundred."""
    optimizer = DoGEOptimizer(
        FusedSGD([torch.ones(4, requires_grad=True)], lr=lr), domains=["a", "b"], micro_batches=None
    )
    (weight,) = optimizer.param_groups[0]["params"]
    factors = {"a": 0.2, "b": 0.1}
    enter(optimizer, factors, lambda name: factors[name] * weight.sum())
    with Recorded() as graph:
        optimizer.combine()
    for _ in range(110):
        graph.replay()
    assert optimizer.weights["a"] > optimizer.weights["b"]
    assert optimizer.num_steps == 111


def test_the_first_step_of_sgd_with_momentum_needs_the_host():
    """Its momentum would be uninitialised memory if the device skipped that step."""
    weight = torch.zeros(2, requires_grad=True)
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    weight.grad = torch.ones(2)
    assert _needing_the_host(inner) == ["SGD"]
    inner.step()
    assert _needing_the_host(inner) == []
