"""What the wrapper refuses, what it keeps, and how it behaves as a torch optimizer."""

import copy
import gc
import json
import math
import pickle
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer, wrapper
from doge_fast.step import parameters
from tests.models import domain_tokens, tied_transformer

DOMAINS = ("a", "b", "c")
# The paper's text to the letter.
AS_IN_THE_PAPER: dict[str, Any] = {"mu": 0.01, "domain_max_grad_norm": None}


def build(model: nn.Module | None = None, **kwargs: Any) -> tuple[nn.Module, DoGEOptimizer]:
    model = tied_transformer() if model is None else model
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, DoGEOptimizer(inner, domains=DOMAINS, **(AS_IN_THE_PAPER | kwargs))


def fill(model: nn.Module, optimizer: DoGEOptimizer, step: int = 0, skip: str = "") -> None:
    for row, name in enumerate(optimizer.rows):
        if name not in skip:
            with optimizer.domain(name):
                model(domain_tokens(row, step)).backward()


def everything(model: nn.Module, optimizer: DoGEOptimizer) -> list[Tensor]:
    """Parameters, the wrapped optimizer's state and the domain weights, copied."""
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    return [p.detach().clone() for p in model.parameters()] + state + [optimizer.alpha.clone()]


def assert_unmoved(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(params=["at once", "when the domain is left"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a domain takes its gradients: as on a CPU, and as elsewhere."""
    if request.param != "at once":
        monkeypatch.setattr(parameters, "takes_at_once", lambda param: False)


class TestBadArguments:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"domains": []}, "at least one training domain; got none"),
            ({"domains": ["a", "a", "b"]}, r"must be distinct; \['a'\] occur more than once"),
            ({"domains": ["a", ""]}, "must be a non-empty string; got ''"),
            ({"domains": {"a", "b"}}, "must have an order, that of the simplex; got the set"),
            ({"domains": "abc"}, "sequence of names; got the string 'abc'"),
            ({"domains": ["universal", "a"]}, "cannot name one; rename the domain"),
            ({"domains": 3}, "sequence of names; got 3"),
            ({"domains": ["a", 3]}, "must be a non-empty string; got 3"),
            ({"domains": ["a", ["b"]]}, r"must be a non-empty string; got \['b'\]"),
            ({"domains": frozenset("ab")}, "must have an order"),
            ({"target": 3}, "'universal', a name, a list of names or {name: weight}; got 3"),
            ({"target": []}, "at least one name with a positive weight"),
            ({"target": {"x": -1.0}}, "finite and >= 0; 'x' has -1.0"),
            ({"target": {"x": 0.0}}, "at least one name with a positive weight"),
            ({"target": {"x": math.nan}}, "finite and >= 0; 'x' has nan"),
            ({"target": {"x": "1"}}, "finite and >= 0; 'x' has '1'"),
            ({"target": ["x", "universal"]}, "'universal' stands alone"),
            ({"target": ["x", "x"]}, "target names must be distinct"),
            ({"target": ["x", ["y"]]}, r"must be a non-empty name.*got \['y'\] in"),
            ({"target": ["x", ""]}, "must be a non-empty name.*got '' in"),
            ({"target": {3: 1.0}}, "must be a non-empty name.*got 3 in"),
            ({"target": {"x": True}}, "finite and >= 0; 'x' has True"),
            ({"target": {"x": math.inf}}, "finite and >= 0; 'x' has inf"),
            ({"mu": torch.ones(2)}, "must be positive and finite; got tensor"),
            ({"mu": 0.0}, "must be positive and finite; got 0.0"),
            ({"mu": -1.0}, "must be positive and finite; got -1.0"),
            ({"mu": math.nan}, "must be positive and finite; got nan"),
            ({"mu": "x"}, "must be positive and finite; got 'x'"),
            ({"mu": True}, "must be positive and finite; got True"),
            ({"smoothing": "x"}, r"must be in \[0, 1\); got 'x'"),
            ({"smoothing": -0.1}, r"must be in \[0, 1\); got -0.1"),
            ({"smoothing": math.nan}, r"must be in \[0, 1\); got nan"),
            ({"score": "best"}, "'paper', 'published' or a Score; got 'best'"),
            ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, or None"),
            ({"max_grad_norm": "x"}, "max_grad_norm must be positive, or None .* got 'x'"),
            ({"max_grad_norm": True}, "max_grad_norm must be positive, or None .* got True"),
            ({"max_grad_norm": math.nan}, "max_grad_norm must be positive, or None .* got nan"),
            ({"smoothing": 1.0}, r"must be in \[0, 1\); got 1.0"),
            ({"initial": {"a": True, "b": 0, "c": 0}}, "weights >= 0; 'a' has True"),
            ({"selection": "embedding"}, "non-empty collection of parameters or names; got 'emb"),
            ({"domain_max_grad_norm": -1.0}, "domain_max_grad_norm must be positive, or None"),
            ({"absent": "zero"}, "absent must be 'error' or 'keep'; got 'zero'"),
            ({"selection": []}, "non-empty collection"),
            ({"selection": ["nope"]}, "build the wrapped optimizer from model.named_parameters"),
            ({"buffer_dtype": torch.int32}, "must be a floating type or None; got torch.int32"),
        ],
    )
    def test_is_refused_with_a_sentence(self, kwargs: dict[str, Any], message: str) -> None:
        inner = torch.optim.SGD(tied_transformer().parameters(), lr=0.1)
        with pytest.raises(ValueError, match=message):
            DoGEOptimizer(inner, **{"domains": DOMAINS, **kwargs})

    def test_unknown_name_in_selection_lists_known_ones(self) -> None:
        inner = torch.optim.SGD(tied_transformer().named_parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'nope', which is not a parameter.*It knows \['emb"):
            DoGEOptimizer(inner, domains=DOMAINS, selection=["nope"])

    def test_needs_an_optimizer(self) -> None:
        model = tied_transformer()
        wrongs = {"generator": model.parameters(), "Parameter": [*model.parameters()]}
        for kind, wrong in wrongs.items():
            with pytest.raises(TypeError, match=f"wraps a torch.optim.Optimizer.*got {kind}"):
                DoGEOptimizer(wrong, domains=DOMAINS)  # type: ignore[arg-type]

    def test_does_not_wrap_itself(self) -> None:
        _, optimizer = build()
        with pytest.raises(TypeError, match="already"):
            DoGEOptimizer(optimizer, domains=DOMAINS)

    @pytest.mark.parametrize("lr", [None, "0.1", "nowhere"])
    def test_needs_a_learning_rate(self, lr: Any) -> None:
        """As of Adafactor, which may choose it by itself; the message comes before any step."""
        inner = torch.optim.SGD(tied_transformer().parameters(), lr=0.1)
        inner.param_groups[0]["lr"] = lr
        if lr == "nowhere":
            del inner.param_groups[0]["lr"]
            lr = None
        with pytest.raises(TypeError, match=f"a number or a tensor; SGD has {lr!r} there"):
            DoGEOptimizer(inner, domains=DOMAINS)

    @pytest.mark.parametrize("lr", [0, np.float32(0.1), torch.tensor(0.1)], ids=repr)
    def test_a_learning_rate_is_any_number(self, lr: Any) -> None:
        inner = torch.optim.SGD(tied_transformer().parameters(), lr=0.1)
        inner.param_groups[0]["lr"] = lr
        assert DoGEOptimizer(inner, domains=DOMAINS, mu=1.0).param_groups[0]["lr"] is lr

    def test_mu_follows_a_learning_rate_that_is_there(self) -> None:
        inner = torch.optim.SGD(tied_transformer().parameters(), lr=0.0)
        with pytest.raises(ValueError, match=r"mu=None is computed from.*Pass mu="):
            DoGEOptimizer(inner, domains=DOMAINS)

    def test_needs_parameters(self) -> None:
        inner = torch.optim.SGD([{"params": []}], lr=0.1)
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            DoGEOptimizer(inner, domains=DOMAINS)


@pytest.mark.usefixtures("taken")
class TestMisuse:
    def test_missing_domain(self) -> None:
        model, optimizer = build()
        fill(model, optimizer, skip="b")
        before = everything(model, optimizer)
        with pytest.raises(RuntimeError, match=r"gradient from every domain; missing \['b'\] of"):
            optimizer.step()
        assert_unmoved(before, everything(model, optimizer))

    @pytest.mark.parametrize("target", ["B", {"b": 1.0, "B": 1.0}], ids=str)
    def test_a_target_that_never_comes(self, target: Any) -> None:
        """Weights stay where they are where absent domains are kept; reading them says why."""
        model, optimizer = build(target=target, absent="keep")
        for step in range(3):
            fill(model, optimizer, step, skip="cB")
            optimizer.step()
            optimizer.zero_grad()
        with pytest.warns(match=r"learned nothing in 3 steps: .* of the target \['B'\]") as told:
            assert optimizer.weights == dict.fromkeys("abc", 1 / 3)
        # The line that reads them.
        assert [each.filename for each in told] == [__file__]
        # Once is enough: a second warning would be an error here.
        assert optimizer.weights

    @pytest.mark.parametrize("target", ["x", "b", "universal"])
    def test_a_target_that_comes_now_and_then(self, target: str) -> None:
        """No warning, which would be an error here."""
        model, optimizer = build(target=target, absent="keep", mu=30.0)
        for step in range(4):
            fill(model, optimizer, step, skip="" if step == 2 else f"c{target}")
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.weights

    @pytest.mark.parametrize("state", [None, [1]])
    def test_a_state_that_is_no_dict(self, state: Any) -> None:
        _, optimizer = build()
        for each in (optimizer, optimizer.doge):
            with pytest.raises(TypeError, match=r"load_state_dict\(\) needs"):
                each.load_state_dict(state)
        with pytest.raises(TypeError, match=r"load_state_dict\(\) needs"):
            optimizer.load_state_dict(optimizer.inner.state_dict() | {"doge": [1]})

    def test_backward_outside_any_domain(self) -> None:
        model, optimizer = build()
        model(domain_tokens(0, 0)).backward()
        for refused in (optimizer.step, optimizer.domain("a").__enter__):
            with pytest.raises(RuntimeError, match="ran outside any domain"):
                refused()
        optimizer.zero_grad()
        fill(model, optimizer)
        before = everything(model, optimizer)
        model(domain_tokens(0, 0)).backward()
        with pytest.raises(RuntimeError, match="ran outside any domain"):
            optimizer.step()
        assert_unmoved(before, everything(model, optimizer))
        optimizer.zero_grad()
        optimizer.release()
        for step in range(3):
            model(domain_tokens(0, step)).backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.num_steps == 1

    def test_nested_domains(self) -> None:
        _, optimizer = build()
        with (
            pytest.raises(RuntimeError, match=r"entered inside domain\('a'\)"),
            optimizer.domain("a"),
            optimizer.domain("b"),
        ):
            pass

    def test_step_inside_a_domain(self) -> None:
        model, optimizer = build()
        with optimizer.domain("a"):
            model(domain_tokens(0, 0)).backward()
            with pytest.raises(RuntimeError, match=r"must be called outside domain.*'a' is active"):
                optimizer.step()

    @pytest.mark.parametrize("what", ["zero_grad", "release", "load_state_dict"])
    def test_clearing_inside_a_domain(self, what: str) -> None:
        model, optimizer = build()
        arguments = [optimizer.state_dict()] if what == "load_state_dict" else []
        with optimizer.domain("a"):
            model(domain_tokens(0, 0)).backward()
            with pytest.raises(RuntimeError, match=rf"{what}\(\) must be called outside domain"):
                getattr(optimizer, what)(*arguments)

    def test_combine_twice(self) -> None:
        model, optimizer = build(micro_batches=None)
        fill(model, optimizer)
        optimizer.combine()
        with pytest.raises(RuntimeError, match="call step"):
            optimizer.combine()

    @pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
    def test_micro_batches_is_a_number(self, count: Any) -> None:
        with pytest.raises(ValueError, match=r"micro_batches must be .* at least 1, or None"):
            build(micro_batches=count)

    def test_a_factor_that_comes_too_late(self) -> None:
        model, optimizer = build()
        fill(model, optimizer)
        optimizer.combine()
        with pytest.raises(RuntimeError, match=r"without this grad_scale\. Pass .*scaler=scaler"):
            optimizer.combine(grad_scale=8.0)

    def test_a_learning_rate_set_too_late(self) -> None:
        model, optimizer = build()
        fill(model, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-6
        with pytest.raises(RuntimeError, match=r"rate has changed from 0\.01 to 1e-06"):
            optimizer.step()
        model, optimizer = build(micro_batches=None)
        fill(model, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-6
        optimizer.step()
        assert optimizer.last.lr == 1e-6

    def test_an_error_in_combining_drops_the_step(self) -> None:
        model, optimizer = build(nn.ModuleDict({"used": nn.Linear(2, 1), "not": nn.Linear(2, 1)}))
        optimizer = DoGEOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            domains=DOMAINS,
            selection=[model["not"].weight],
        )
        for _ in range(2):
            for name in DOMAINS:
                said = "no selected parameter received a gradient"
                fails = pytest.raises(RuntimeError, match=said) if name == "c" else nullcontext()
                with fails, optimizer.domain(name):
                    model["used"](torch.ones(1, 2)).sum().backward()

    def test_a_scaler_is_one(self) -> None:
        with pytest.raises(TypeError, match=r"scaler must be a torch.amp.GradScaler or None"):
            build(scaler=65536.0)

    def test_no_backward_inside_a_domain(self) -> None:
        _, optimizer = build()
        with (
            pytest.raises(RuntimeError, match=r"received a gradient inside domain\('a'\)"),
            optimizer.domain("a"),
        ):
            pass

    def test_parameters_replaced_after_construction(self) -> None:
        model = nn.Linear(3, 1, bias=False)
        _, optimizer = build(model)
        model.weight = nn.Parameter(torch.ones(1, 3))
        with (
            pytest.raises(RuntimeError, match="parameters were replaced after the optimizer"),
            optimizer.domain("a"),
        ):
            model(torch.ones(2, 3)).sum().backward()

    def test_model_moved_after_its_first_gradient(self) -> None:
        model, optimizer = build()
        fill(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model.float()
        with (
            pytest.raises(RuntimeError, match="moved or cast after its first gradient"),
            optimizer.domain("a"),
        ):
            model(domain_tokens(0, 0)).backward()

    def test_model_moved_before_its_first_gradient_is_fine(self) -> None:
        model, optimizer = build()
        model.float()
        fill(model, optimizer)
        optimizer.step()
        assert optimizer.num_steps == 1

    def test_sparse_gradients(self) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        inner = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(inner, domains=DOMAINS)
        with (
            pytest.raises(RuntimeError, match="must be dense"),
            optimizer.domain("a"),
        ):
            model(torch.tensor([1])).sum().backward()

    def test_exception_inside_a_domain_drops_the_step(self) -> None:
        model, optimizer = build()
        fill(model, optimizer, skip="c")
        model.norm.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError), optimizer.domain("c"):
            model(domain_tokens(2, 0)).backward()
        model.norm.weight._backward_hooks.clear()
        with pytest.raises(RuntimeError, match=r"missing \['a', 'b', 'c'\]"):
            optimizer.step()
        fill(model, optimizer)
        optimizer.step()
        assert optimizer.num_steps == 1


@pytest.mark.usefixtures("taken")
class TestNonFinite:
    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("selected", [False, True])
    def test_skips_counts_and_moves_nothing(self, value: float, selected: bool) -> None:
        model = tied_transformer()
        inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
        selection = ["norm.weight"] if selected else None
        optimizer = DoGEOptimizer(inner, domains=DOMAINS, max_grad_norm=1.0, selection=selection)
        fill(model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer)
        mean = optimizer.alpha_mean.clone()
        # One element of one domain, outside the selection.
        handle = model.layers[0]["up"].weight.register_hook(
            lambda grad: grad.index_fill(0, torch.tensor([1]), value)
        )
        fill(model, optimizer, 1)
        optimizer.step()
        optimizer.zero_grad()
        assert_unmoved(before, everything(model, optimizer))
        assert torch.equal(optimizer.alpha_mean, mean)
        assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
        assert bool(optimizer.last.skipped)
        handle.remove()
        fill(model, optimizer, 2)
        optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped) == (2, 1)
        assert not torch.equal(optimizer.alpha_mean, mean)


@pytest.mark.usefixtures("taken")
class TestGradients:
    def test_gradient_is_the_weighted_sum(self) -> None:
        model, optimizer = build()
        params = list(model.parameters())
        grads = [torch.autograd.grad(model(domain_tokens(row, 0)), params) for row in range(3)]
        fill(model, optimizer)
        optimizer.combine()
        for i, param in enumerate(params):
            expected = sum(a * g[i] for a, g in zip(optimizer.alpha, grads, strict=True))
            torch.testing.assert_close(param.grad, expected, rtol=1e-12, atol=1e-14)

    def test_untouched_parameters_keep_no_gradient(self) -> None:
        model, optimizer = build(
            nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}).double()
        )
        for name in DOMAINS:
            with optimizer.domain(name):
                model["used"](torch.ones(1, 2).double()).sum().backward()
        before = model["unused"].weight.clone()
        optimizer.step()
        assert model["unused"].weight.grad is None
        assert torch.equal(model["unused"].weight, before)

    def test_a_parameter_some_domains_do_not_touch_counts_as_zero(self) -> None:
        """Over two steps, so that a row left from the first would show in the second."""
        model, optimizer = build(
            nn.ModuleDict({"all": nn.Linear(2, 1), "some": nn.Linear(2, 1)}).double()
        )
        x = torch.ones(1, 2).double()
        for step in range(2):
            for i, name in enumerate(DOMAINS):
                with optimizer.domain(name):
                    loss = model["all"](x).sum()
                    if (i + step) % 2 == 0:
                        loss = loss + model["some"](x).sum() * (i + 1)
                    loss.backward()
            optimizer.combine()
            alpha = optimizer.alpha
            expected = sum(alpha[i] * (i + 1) for i in range(len(DOMAINS)) if (i + step) % 2 == 0)
            torch.testing.assert_close(model["some"].bias.grad, expected[None])
            optimizer.step()
            optimizer.zero_grad()

    def test_frozen_parameters_stay(self) -> None:
        model = tied_transformer()
        model.position.weight.requires_grad_(False)
        _, optimizer = build(model)
        before = model.position.weight.clone()
        fill(model, optimizer)
        optimizer.step()
        assert model.position.weight.grad is None
        assert torch.equal(model.position.weight, before)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_parameters(self, dtype: torch.dtype) -> None:
        model, optimizer = build(tied_transformer().to(dtype))
        params = list(model.parameters())
        grads = [torch.autograd.grad(model(domain_tokens(row, 0)), params) for row in range(3)]
        rows = torch.stack([torch.cat([g.double().flatten() for g in gs]) for gs in grads])
        fill(model, optimizer)
        optimizer.combine()
        gram = rows @ rows.T
        torch.testing.assert_close(optimizer.last.gram, gram, rtol=1e-6, atol=0)
        flat = torch.cat([p.grad.double().flatten() for p in params])
        expected = optimizer.alpha @ rows
        assert all(p.grad.dtype == dtype for p in params)
        # One rounding to storage: half an ulp of each element.
        assert ((flat - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-7).all()

    def test_float32_buffer_of_bfloat16_gradients_adds_micro_batches_in_float32(self) -> None:
        weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        optimizer = DoGEOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            domains=["a"],
            buffer_dtype=torch.float32,
            domain_max_grad_norm=None,
            micro_batches=2,
        )
        # 256 + 1 rounds back to 256 in bfloat16.
        for value in (256.0, 1.0):
            with optimizer.domain("a"):
                (weight * value).sum().backward()
        optimizer.combine()
        assert optimizer.last.gram.item() == 257.0**2

    def test_gradient_accumulation_adds_up(self) -> None:
        model, optimizer = build(micro_batches=3)
        params = list(model.parameters())
        expected = [torch.zeros_like(p) for p in params]
        for micro in range(3):
            for row, name in enumerate(DOMAINS):
                with optimizer.domain(name):
                    model(domain_tokens(row, micro)).backward()
                if name == "b":
                    for e, g in zip(
                        expected,
                        torch.autograd.grad(model(domain_tokens(row, micro)), params),
                        strict=True,
                    ):
                        e += g
        optimizer.combine()
        norm_b = torch.cat([e.flatten() for e in expected]).norm()
        torch.testing.assert_close(optimizer.last.grad_norms[1], norm_b, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("is_selected", [False, True])
    def test_grad_scale_changes_nothing_but_the_factor_in_p_grad(self, is_selected: bool) -> None:
        """The norm that is cut sees all columns, those outside the selection too."""
        grads, alphas, norms = [], [], []
        for scale in (1.0, 1024.0):
            model = tied_transformer()
            selection = [next(model.parameters())] if is_selected else None
            model, optimizer = build(
                model, max_grad_norm=0.1, micro_batches=None, selection=selection
            )
            for row, name in enumerate(DOMAINS):
                with optimizer.domain(name):
                    (model(domain_tokens(row, 0)) * scale).backward()
            optimizer.combine(grad_scale=scale)
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]) / scale)
            alphas.append(optimizer.alpha)
            norms.append(optimizer.last.combined_norm)
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(alphas[0], alphas[1], rtol=1e-12, atol=0)

    @pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
    def test_fused_optimizers_see_gradients_in_the_parameters_memory_order(
        self, inner: Any
    ) -> None:
        model = nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last)
        plain = copy.deepcopy(model)
        x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
        optimizer = DoGEOptimizer(inner(model.parameters(), lr=0.1, fused=True), domains=["a"])
        with optimizer.domain("a"):
            model(x).square().mean().backward()
        optimizer.step()
        twin = inner(plain.parameters(), lr=0.1, fused=True)
        plain(x).square().mean().backward()
        twin.step()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad.stride() == param.stride()
            torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-14)

    def test_a_selection_leaves_parameters_in_any_memory_order(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 1))
        model = model.to(memory_format=torch.channels_last)
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        options = {"selection": ["2.weight"], "domain_max_grad_norm": None, "max_grad_norm": 0.1}
        optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0, **options)
        for name in "ab":
            with optimizer.domain(name):
                x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
                model(x).square().mean().backward()
        norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
        assert norm.item() == pytest.approx(0.1, rel=1e-4)

    def test_learning_rate_of_nan_spoils_nothing(self) -> None:
        model, optimizer = build()
        optimizer.param_groups[0]["lr"] = torch.tensor(math.nan)
        before = everything(model, optimizer)
        fill(model, optimizer)
        optimizer.step()
        assert_unmoved(before, everything(model, optimizer))
        assert optimizer.num_skipped == 1

    def test_a_parameter_unfrozen_within_a_step_counts_from_the_next_on(self) -> None:
        model, optimizer = build(nn.Linear(2, 1).double(), micro_batches=None)
        model.bias.requires_grad_(False)
        x = torch.ones(1, 2).double()
        for name in DOMAINS:
            with optimizer.domain(name):
                model(x).sum().backward()
            model.bias.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"\[1\] has a p.grad from outside the domains"):
            optimizer.combine()
        optimizer.zero_grad()
        for name in DOMAINS:
            with optimizer.domain(name):
                model(x).sum().backward()
        optimizer.combine()
        torch.testing.assert_close(model.bias.grad, optimizer.alpha.sum()[None])

    def test_the_factor_of_a_scaler_lies_on_the_device(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        factor = wrapper.loss_scale(None, scaler, torch.device("cpu"))
        assert isinstance(factor, Tensor)
        assert factor == 256.0
        far = wrapper.loss_scale(None, torch.amp.GradScaler("cpu"), torch.device("meta"))
        assert isinstance(far, Tensor)
        assert far.device.type == "meta"

    def test_memory_is_rows_plus_one_gradient(self) -> None:
        model, optimizer = build(target="x")
        fill(model, optimizer)
        optimizer.step()
        # At most a line to align a row and one to keep rows from lying pages apart.
        params = list(model.parameters())
        exact = 4 * 8 * sum(p.numel() for p in params)
        assert exact <= optimizer.buffer.num_bytes <= exact + 4 * 8 * 128 * len(params)


class TestTorchOptimizer:
    def test_is_one(self) -> None:
        _, optimizer = build()
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is optimizer.inner.param_groups
        assert optimizer.state is optimizer.inner.state

    def test_foreign_gradient_is_the_wrapped_optimizers_own_step(self) -> None:
        model, optimizer = build()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.num_steps == 0
        assert len(optimizer.state) > 0

    def test_zero_grad_to_zeros(self) -> None:
        model, optimizer = build()
        fill(model, optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all((p.grad == 0).all() for p in model.parameters())
        twin = copy.deepcopy(optimizer.alpha)
        fill(model, optimizer, 1)
        optimizer.step()
        assert not torch.equal(twin, optimizer.alpha)

    @pytest.mark.parametrize("way", ["deepcopy", "pickle"])
    def test_copies_go_on_alone(self, way: str) -> None:
        model, optimizer = build()
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        fill(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        pair = (model, optimizer)
        twin, copied = (
            copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
        )
        for m, o in ((model, optimizer), (twin, copied)):
            fill(m, o, 1)
            o.step()
            o.zero_grad()
        assert torch.equal(optimizer.alpha_mean, copied.alpha_mean)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert param is not other
            assert torch.equal(param, other)

    def test_does_not_outlive_its_references(self) -> None:
        model, optimizer = build()
        ref = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert ref() is None
        assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
        model(domain_tokens(0, 0)).backward()

    def test_other_domains_in_a_checkpoint(self) -> None:
        model, optimizer = build()
        state = optimizer.state_dict()
        inner = torch.optim.AdamW(model.parameters())
        other = DoGEOptimizer(inner, domains=["a", "c", "b"])
        with pytest.raises(ValueError, match=r"has the domains \['a', 'b', 'c'\]"):
            other.load_state_dict(state)

    def test_other_target_in_a_checkpoint(self) -> None:
        _, optimizer = build(target="x")
        _, other = build()
        with pytest.raises(ValueError, match=r"the rows .*'x'\].*the same target"):
            other.load_state_dict(optimizer.state_dict())

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda ours: ours.pop("gain"), r"lacks \['gain'\]"),
            (lambda ours: ours["alpha"].fill_(math.nan), "3 weights that sum to one"),
            (lambda ours: ours.update(alpha_mean=torch.ones(2)), "3 weights that sum to one"),
            (
                lambda ours: ours["alpha"].copy_(torch.tensor([2.0, -1, 0])),
                "3 weights that sum to one",
            ),
            (lambda ours: ours["gain"].fill_(math.inf), "3 finite scores"),
            (lambda ours: ours.update(gain=torch.ones(1)), "3 finite scores"),
            (lambda ours: ours.pop("version"), "not written by state_dict"),
            (lambda ours: ours.pop("rows"), r"lacks \['rows'\]"),
            (lambda ours: ours.update(version="2"), "version must be a count; it is '2'"),
            (lambda ours: ours.update(version=99), "has version 99"),
            (lambda ours: ours.update(draws=-1), "draws must be a count; it is -1"),
            (lambda ours: ours.update(draws=True), "draws must be a count; it is True"),
            (lambda ours: ours.update(domains="abc"), "domains must be names; it is 'abc'"),
            (lambda ours: ours.update(alpha=[1.0, 0.0, 0.0]), "alpha must be a tensor"),
            (lambda ours: ours["num_steps"].fill_(-1), "num_steps must be a count; it is tensor"),
            (lambda ours: ours.update(num_skipped=3), "num_skipped must be a tensor; it is 3"),
            (lambda ours: ours.update(mu=math.nan), "must be positive and finite"),
            (lambda ours: ours.update(mu="fast"), "must be positive and finite"),
        ],
    )
    def test_spoilt_checkpoint_changes_nothing(self, spoil: Any, message: str) -> None:
        _, optimizer = build()
        state = optimizer.state_dict()
        spoil(state["doge"])
        state["param_groups"][0]["lr"] = 0.5
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1e-2


def test_save_weights_is_keyed_by_name(tmp_path: Path) -> None:
    weights_file = tmp_path / "weights.json"
    model, optimizer = build(target={"x": 0.5})
    fill(model, optimizer)
    optimizer.step()
    optimizer.save_weights(weights_file)
    record = json.loads(weights_file.read_text())
    assert [d["name"] for d in record["domains"]] == list(DOMAINS)
    assert {d["name"]: d["weight"] for d in record["domains"]} == optimizer.weights
    assert math.isclose(sum(optimizer.weights.values()), 1.0)
    assert record["target"] == {"x": 0.5}
    assert list(tmp_path.iterdir()) == [weights_file]


@pytest.mark.usefixtures("taken")
def test_of_two_wrappers_that_take_turns_the_one_in_use_listens() -> None:
    model = torch.nn.Linear(3, 2)
    old, new = (
        DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
        for _ in range(2)
    )
    for optimizer in (new, old, new):
        for name in "ab":
            with optimizer.domain(name):
                model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (new.num_steps, old.num_steps) == (2, 1)
