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

    times = 1
    """How often a step enters each domain."""

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
        self._rows: dict[str, list[Tensor]] = {}
        self._used: set[Tensor] = set()

    @contextmanager
    def domain(self, name: str) -> Iterator[None]:
        """Gradients of the backward passes inside belong to domain `name`."""
        if name not in self.names or len(self._rows.get(name, ())) == self.times:
            raise ValueError(f"a step enters each of {self.names} {self.times} x; got {name!r}.")
        self.optimizer.zero_grad()
        yield
        params = self._params()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        self._rows.setdefault(name, []).append(torch.cat([grad.flatten() for grad in grads]))
        self._used.update(param for param in params if param.grad is not None)
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Move the domain weights, then the model by the newly weighted gradient (Algorithm 1)."""
        # [times, R, N]
        parts_TRN = torch.stack([torch.stack(self._rows[name]) for name in self.names], dim=1)
        used, self._rows, self._used = self._used, {}, set()
        # Sums of a model in 16 bits are in float32 too; under autocast those of `@` would not be.
        parts_TRN = parts_TRN.to(torch.promote_types(parts_TRN.dtype, torch.float32))
        if not self._move(parts_TRN):
            return  # An overflow changes neither the weights nor the model.

        # theta' = the optimizer's step with sum_j alpha'_j g_j. A parameter that no domain uses
        # keeps p.grad None: with a gradient of zero, weight decay would still move it.
        params = self._params()
        grads_KN = parts_TRN.sum(0)[: len(self.domains)]
        gradient_N = (self.mixture_K.to(grads_KN)[:, None] * grads_KN).sum(0)
        pieces = torch.split(gradient_N, [param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            if param in used:
                # In its memory format, as a fused optimizer takes it to be.
                param.grad = torch.empty_like(param).copy_(piece.view_as(param))
        self.optimizer.step()

    def _move(self, parts_TRN: Tensor) -> bool:
        """Move the domain weights, unless a gradient is not finite; clip each domain in place."""
        grads_RN = parts_TRN[0]
        if self.domain_max_grad_norm is not None:
            norms_R1 = grads_RN.norm(dim=1, keepdim=True)
            grads_RN *= (self.domain_max_grad_norm / (norms_R1 + 1e-6)).clamp(max=1)
        grads_KN = grads_RN[: len(self.domains)]

        # W_j = < g_j , sum_r tau_r g_r >, eq. (ge-decompose).
        tau_R1 = grads_RN.new_tensor([[self.tau.get(name, 0.0)] for name in self.names])
        gain_K = (grads_KN * (tau_R1 * grads_RN).sum(0)).sum(1).double().cpu()
        if not gain_K.isfinite().all():
            return False

        # alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu), eq. (update_dw);
        # a softmax of logarithms does not overflow.
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.alpha_K = torch.softmax(self.alpha_K.log() + lr / self.mu * gain_K, dim=0)
        self._num_steps += 1
        self.alpha_mean_K = self.alpha_mean_K + (self.alpha_K - self.alpha_mean_K) / self._num_steps
        return True

    @property
    def mixture_K(self) -> Tensor:
        """The mixture that the model moves by."""
        return self.alpha_K

    @property
    def weights(self) -> dict[str, float]:
        """The result: the mean of alpha over the steps (Algorithm 1, last line)."""
        return dict(zip(self.domains, self.alpha_mean_K.tolist(), strict=True))

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


class SimpleAligned(SimpleDoGE):
    """The rule "aligned": each domain is entered twice in a step, with half of its batch.

    alpha goes to the maximum of W.a / sqrt(a'Ga) in AdamW's metric; `doge_fast.weights.aligned`
    says why. `mu` and `domain_max_grad_norm` have no meaning here.
    """

    times = 2
    _mean_RR: Tensor | float = 0.0

    def _move(self, parts_TRN: Tensor) -> bool:
        """One mirror step on log(W.a / sqrt(a'Ga)) of the mean matrix, after twenty steps."""
        grads_RN = parts_TRN.sum(0)
        self._before_K = self.alpha_K
        eps = self.optimizer.param_groups[0].get("eps", 0.0)
        moments = [
            self.optimizer.state.get(param, {}).get("exp_avg_sq", torch.full_like(param, torch.nan))
            for param in self._params()
        ]
        moments_N = torch.cat([moment.flatten().to(grads_RN) for moment in moments])
        # AdamW's; 1 without second moments, and 0 where there was no gradient yet.
        metric_N = (1 / (moments_N.sqrt() + eps)).nan_to_num(nan=1.0) * (moments_N != 0)
        gram_RR = ((grads_RN * metric_N) @ grads_RN.T).double().cpu()
        scale = 1 / gram_RR.diagonal().mean()
        # G_jj = 4 <a_j, b_j>: without the noise of ||g_j||^2.
        gram_RR.diagonal().copy_(4 * (parts_TRN[0] * metric_N * parts_TRN[1]).sum(1))
        if not (scale * gram_RR).isfinite().all():
            return False

        K, alpha_K = len(self.domains), self.alpha_K
        tau_R = gram_RR.new_tensor([self.tau.get(name, 0.0) for name in self.names])
        self._num_steps += 1
        mean_RR = self._mean_RR + (scale * gram_RR - self._mean_RR) / self._num_steps
        self._mean_RR = mean_RR
        if self._num_steps > 20:
            gain_K, own_K = (mean_RR @ tau_R)[:K], mean_RR[:K, :K] @ alpha_K
            share_K = gain_K / torch.maximum(gain_K @ alpha_K, 0.1 * gain_K.abs().max())
            square = own_K @ alpha_K
            if square > 0.01 / K * mean_RR.diagonal()[:K].abs().mean():  # else it is noise
                slope_K = (share_K - (share_K @ alpha_K) * own_K / square).clamp(-10, 10)
                alpha_K = torch.softmax(alpha_K.log() + 0.1 * slope_K, dim=0)
            raised_K = alpha_K.clamp(min=0.01 / K)
            self.alpha_K = self.alpha_mean_K = raised_K / raised_K.sum()
        return True

    @property
    def mixture_K(self) -> Tensor:
        """Half-way from uniform weights to alpha of the step before."""
        return (self._before_K + 1 / len(self.domains)) / 2
