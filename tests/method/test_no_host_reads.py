"""A step asks the host for nothing: it runs on tensors that have no values to ask for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import DoGEOptimizer


class FusedSGD(torch.optim.SGD):
    """Takes the flag of a skipped step on the device, as torch's fused optimizers do."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, params: Any, lr: float | Tensor) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group |= {"lr": lr, "fused": True}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                moved = param.detach() - group["lr"] * param.grad
                param.detach().copy_(torch.where(self.found_inf == 0, moved, param))


def run(optimizer_of: Any, lr: float | Tensor = 0.1, grad_scale: Any = 1.0, **options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to("meta")
    optimizer = DoGEOptimizer(
        optimizer_of(model.named_parameters(), lr=lr),
        domains=["a", "b"],
        target={"a": 1.0, "x": 2.0},
        **({"mu": 0.01, "domain_max_grad_norm": None, "micro_batches": None} | options),
    )
    for _ in range(2):
        for name in "abx":
            with optimizer.domain(name):
                model(torch.empty(4, 8, device="meta")).square().mean().backward()
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
        {"lr": torch.empty((), device="meta")},
        {"grad_scale": torch.empty((), device="meta")},
        {"buffer_dtype": torch.bfloat16},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_step_needs_no_value(options: dict[str, Any]) -> None:
    optimizer = run(FusedSGD, **options)
    assert optimizer.last.alpha.is_meta
    assert optimizer.last.skipped.is_meta


def test_without_a_fused_optimizer_one_flag_is_read() -> None:
    """The check above sees a read: this one asks whether the step is skipped."""
    with pytest.raises(RuntimeError, match="meta tensor"):
        run(torch.optim.SGD)


def test_the_addresses_of_the_state_stay() -> None:
    """What a CUDA graph captures is written again at the same place."""
    model = torch.nn.Linear(8, 4)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    seen = set()
    for _ in range(3):
        for name in "ab":
            with optimizer.domain(name):
                model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state_S = optimizer._weights._state_S
        blocks = optimizer.buffer._blocks.values()
        seen.add(
            (
                state_S.data_ptr(),
                *(block.rows_RN.data_ptr() for block in blocks),
                *(block.gradient().data_ptr() for block in blocks),
                *(
                    getattr(optimizer._weights, name)._vector.data_ptr()
                    for name in ("_settings_C", "_tau_R", "_present_R")
                ),
            )
        )
        optimizer.zero_grad()
    assert len(seen) == 1
