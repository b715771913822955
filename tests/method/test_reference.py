"""The truth itself, against numbers worked out by hand and against the definitions."""

import math

import torch

from doge_fast import reference


def test_two_domains_by_hand():
    """g_1 = (1, 0), g_2 = (1, 1): G = [[1, 1], [1, 2]], W = (2, 3), alpha' ~ (1, e)."""
    grads_RN = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    alpha_K, gradient_N, gain_K = reference.step(
        grads_RN,
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        tau_R=torch.ones(2, dtype=torch.float64),
        lr=0.1,
        mu=0.1,
    )
    share = math.e / (1 + math.e)
    torch.testing.assert_close(gain_K, torch.tensor([2.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(alpha_K, torch.tensor([1 - share, share], dtype=torch.float64))
    torch.testing.assert_close(gradient_N, torch.tensor([1.0, share], dtype=torch.float64))


def test_out_of_domain_by_hand():
    """Towards (0, 1) only the second domain helps: W = (0, 1)."""
    grads_RN = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    alpha_K, gradient_N, gain_K = reference.step(
        grads_RN,
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        tau_R=torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
        lr=1.0,
        mu=1.0,
        max_grad_norm=0.5,
    )
    assert gain_K.tolist() == [0.0, 1.0]
    torch.testing.assert_close(alpha_K[1] / alpha_K[0], torch.tensor(math.e).double())
    torch.testing.assert_close(gradient_N.norm(), torch.tensor(0.5).double(), rtol=2e-6, atol=0)


def test_mirror_step_minimises_the_regularised_objective():
    """alpha' = argmin -lr < a, W > + mu KL(a | alpha): no nearby point of the simplex is better."""
    generator = torch.Generator().manual_seed(0)
    alpha_K = torch.rand(5, generator=generator, dtype=torch.float64).softmax(0)
    gain_K = torch.randn(5, generator=generator, dtype=torch.float64)
    lr, mu = 0.3, 0.2

    def objective(point: torch.Tensor) -> float:
        return float(-lr * point @ gain_K + mu * (point * (point / alpha_K).log()).sum())

    best_K = reference.mirror_step(alpha_K, gain_K, lr, mu)
    for _ in range(200):
        direction = torch.randn(5, generator=generator, dtype=torch.float64)
        nearby_K = (best_K.log() + 1e-2 * direction).softmax(0)
        assert objective(nearby_K) > objective(best_K)
