"""The whole method in plain torch, for one process: the place to start reading.

A step works on two levels. The inner level trains the proxy model on a weighted sum of domain
gradients. The outer level learns these weights: the more a step on a domain lowers the target
losses, the more weight the domain gets. `DoGEOptimizer` computes the same numbers with fused
kernels, and adds several processes, stacked passes, accumulation, mixed precision and checkpoints.

The letters after a name are its axes: K training domains, R rows (the training domains, then the
held-out targets), N elements of all parameters, concatenated.

Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class SimpleDoGE:
    """Learn domain weights while `optimizer` trains the proxy model.

    Every step enters each domain once, in any order::

        for name, batch in batches.items():
            with doge.domain(name):
                loss_of(model, batch).backward()
        doge.step()

    Args:
        optimizer: of the proxy model. Pass it to schedulers.
        domains: names of the training domains.
        target: {name: tau >= 0}; the objective is the sum of tau times the loss of that domain. A
            name that is no training domain is measured and never trained on (Algorithm 2). None:
            tau is 1 for each training domain (Algorithm 1).
        mu: > 0; larger values move the weights more slowly. None: 20 lr (T + 1) / 2, where T is
            the sum of the target's weights.
        domain_max_grad_norm: norm to which each domain's gradient is clipped; None: never.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        domains: Sequence[str],
        *,
        target: Mapping[str, float] | None = None,
        mu: float | None = None,
        domain_max_grad_norm: float | None = 1.0,
    ) -> None:
        self.optimizer = optimizer
        self.domains = list(domains)
        self.tau = dict.fromkeys(domains, 1.0) if target is None else dict(target)
        self.names = list(dict.fromkeys([*self.domains, *self.tau]))
        lr = float(optimizer.param_groups[0]["lr"])
        self.mu = 20 * lr * (sum(self.tau.values()) + 1) / 2 if mu is None else mu
        self.domain_max_grad_norm = domain_max_grad_norm
        self.alpha_K = torch.ones(len(domains), dtype=torch.float64, device="cpu") / len(domains)
        self.alpha_mean_K = self.alpha_K
        self._num_steps = 0
        self._rows: dict[str, Tensor] = {}
        self._used: set[Tensor] = set()

    @contextmanager
    def domain(self, name: str) -> Iterator[None]:
        """Gradients of the backward passes inside belong to domain `name`."""
        if name not in self.names or name in self._rows:
            raise ValueError(f"a step enters each of {self.names} once; got {name!r}.")
        self.optimizer.zero_grad()
        yield
        params = self._params()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        self._rows[name] = torch.cat([grad.flatten() for grad in grads])
        self._used.update(param for param in params if param.grad is not None)
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Move the domain weights, then the model by the newly weighted gradient (Algorithm 1)."""
        grads_RN = torch.stack([self._rows[name] for name in self.names])
        used, self._rows, self._used = self._used, {}, set()
        # Sums of a model in 16 bits are in float32 too; under autocast those of `@` would not be.
        grads_RN = grads_RN.to(torch.promote_types(grads_RN.dtype, torch.float32))
        if self.domain_max_grad_norm is not None:
            norms_R1 = grads_RN.norm(dim=1, keepdim=True)
            grads_RN *= (self.domain_max_grad_norm / (norms_R1 + 1e-6)).clamp(max=1)
        grads_KN = grads_RN[: len(self.domains)]

        # W_j = < g_j , sum_r tau_r g_r >, eq. (ge-decompose).
        tau_R1 = grads_RN.new_tensor([[self.tau.get(name, 0.0)] for name in self.names])
        gain_K = (grads_KN * (tau_R1 * grads_RN).sum(0)).sum(1).double().cpu()
        if not gain_K.isfinite().all():
            return  # An overflow changes neither the weights nor the model.

        # alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu), eq. (update_dw);
        # a softmax of logarithms does not overflow.
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.alpha_K = torch.softmax(self.alpha_K.log() + lr / self.mu * gain_K, dim=0)
        self._num_steps += 1
        self.alpha_mean_K = self.alpha_mean_K + (self.alpha_K - self.alpha_mean_K) / self._num_steps

        # theta' = the optimizer's step with sum_j alpha'_j g_j. A parameter that no domain uses
        # keeps p.grad None: with a gradient of zero, weight decay would still move it.
        params = self._params()
        gradient_N = (self.alpha_K.to(grads_KN)[:, None] * grads_KN).sum(0)
        pieces = torch.split(gradient_N, [param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            if param in used:
                # In its memory format, as a fused optimizer takes it to be.
                param.grad = torch.empty_like(param).copy_(piece.view_as(param))
        self.optimizer.step()

    @property
    def weights(self) -> dict[str, float]:
        """The result: the mean of alpha over the steps (Algorithm 1, last line)."""
        return dict(zip(self.domains, self.alpha_mean_K.tolist(), strict=True))

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]
