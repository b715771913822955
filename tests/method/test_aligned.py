"""The aligned rule, against the reference and against the maximum that it goes to."""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer, reference
from doge_fast.losses import domain_losses, linear_domain_losses
from doge_fast.weights.aligned import WAITING_STEPS, AlignedSettings, align
from doge_fast.weights.reweight import new_state, state_views
from doge_fast.weights.rule import Matrices, Names
from tests.method.architectures import VOCABULARY, Tiny

DOMAINS = ("a", "b", "c")
SIZE, INPUTS, OUTPUTS = 8, 6, 3
TARGETS = {
    "held out": {"far": 1.0},
    "two of them": {"far": 0.5, "farther": 2.0},
    "a training domain": {"b": 1.0},
    "some of both": {"a": 1.0, "far": 3.0},
}


def model_and_optimizer(
    target: Any = "universal", micro_batches: int = 2, **arguments: Any
) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 10), nn.Tanh(), nn.Linear(10, OUTPUTS))
    model.to(arguments.pop("params_dtype", torch.float64))
    inner = arguments.pop("inner", torch.optim.AdamW)
    optimizer = DoGEOptimizer(
        inner(model.named_parameters(), lr=1e-2),
        domains=DOMAINS,
        target=target,
        score="aligned",
        micro_batches=micro_batches,
        **arguments,
    )
    return model, optimizer


def batches(steps: int, names: tuple[str, ...]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Each domain has a linear map of its own; "far" is near to "a"."""
    generator = torch.Generator().manual_seed(1)
    maps = {
        n: torch.randn(INPUTS, OUTPUTS, generator=generator, dtype=torch.float64) for n in "abc"
    }
    maps["far"] = maps["a"] + 0.3 * maps["b"]
    maps["farther"] = maps["b"]
    for _ in range(steps):
        batch = {}
        for name in names:
            x = torch.randn(SIZE, INPUTS, generator=generator, dtype=torch.float64)
            noise = torch.randn(SIZE, OUTPUTS, generator=generator, dtype=torch.float64)
            batch[name] = x, x @ maps[name] + 0.1 * noise
        yield batch


def error_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[examples]"""
    return (model(x) - y).square().mean(1)


def fill(
    model: nn.Module, optimizer: DoGEOptimizer, batch: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Enter every domain as often as `micro_batches`, each time with its part of the batch."""
    number = optimizer.micro_batches
    assert number is not None
    for name, (x, y) in batch.items():
        for x_part, y_part in zip(x.tensor_split(number), y.tensor_split(number), strict=True):
            with optimizer.domain(name):
                (error_of(model, x_part, y_part).sum() / len(x)).backward()


def train(steps: int, target: Any, **arguments: Any) -> tuple[nn.Module, DoGEOptimizer]:
    model, optimizer = model_and_optimizer(target, **arguments)
    for batch in batches(steps, optimizer.names):
        fill(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Twin:
    """The same training with the reference."""

    def __init__(
        self, target: Mapping[str, float], num_parts: int, inner: Any, *, is_selective: bool
    ) -> None:
        self.is_selective = is_selective
        self.model, optimizer = model_and_optimizer(target, inner=inner)
        self.names, self.inner, self.num_parts = optimizer.names, optimizer.inner, num_parts
        optimizer.release()
        self.tau_R = torch.tensor([target.get(n, 0.0) for n in self.names]).double()
        self.alpha_K = torch.full((len(DOMAINS),), 1 / len(DOMAINS), dtype=torch.float64)
        self.mean_RR = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        self.num_steps = 0

    def step(self, batch: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        params = list(self.model.parameters())
        halves_2RN = torch.zeros(2, len(self.names), sum(p.numel() for p in params)).double()
        first_R = torch.zeros(len(self.names)).double()
        for row, name in enumerate(self.names):
            x, y = batch[name]
            for part, chosen in enumerate(torch.arange(SIZE).tensor_split(self.num_parts)):
                loss = error_of(self.model, x[chosen], y[chosen]).sum() / SIZE
                grads = torch.autograd.grad(loss, params)
                halves_2RN[part % 2, row] += torch.cat([grad.flatten() for grad in grads])
                first_R[row] += (part % 2 == 0) / self.num_parts
        states = [self.inner.state[param] for param in params]
        metric_N = torch.ones(halves_2RN.shape[2]).double()
        if all("exp_avg_sq" in state for state in states):
            moments = torch.cat([state["exp_avg_sq"].flatten() for state in states])
            metric_N = torch.where(moments > 0, 1 / (moments.sqrt() + 1e-8), 0.0)
        if self.is_selective:
            # The other columns enter no product.
            metric_N[params[0].numel() :] = 0
        self.alpha_K, gradient_N, self.mean_RR = reference.aligned_step(
            *(halves_2RN, self.alpha_K, self.mean_RR, self.num_steps),
            **{"tau_R": self.tau_R, "first_R": first_R, "metric_N": metric_N},
        )
        self.num_steps += 1
        pieces = gradient_N.split([param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            param.grad = piece.view_as(param)
        self.inner.step()


@pytest.mark.parametrize(
    ("target", "num_parts", "inner", "selection"),
    [
        *(
            (target, parts, torch.optim.AdamW, None)
            for target in TARGETS.values()
            for parts in (2, 3, 4)
        ),
        # Without second moments the metric is Euclidean.
        (TARGETS["some of both"], 2, torch.optim.SGD, None),
        (TARGETS["two of them"], 2, torch.optim.AdamW, ["0.weight"]),
    ],
)
def test_the_rule_is_the_reference(target, num_parts, inner, selection):
    steps = WAITING_STEPS + 15
    twin = Twin(target, num_parts, inner, is_selective=selection is not None)
    for batch in batches(steps, twin.names):
        twin.step(batch)
    model, optimizer = train(
        steps, target, micro_batches=num_parts, inner=inner, selection=selection
    )
    torch.testing.assert_close(optimizer.alpha, twin.alpha_K, rtol=1e-9, atol=0)
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() > 0.05
    for ours, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_stacked_pass_halves_each_domain_itself():
    target, steps = {"far": 1.0}, WAITING_STEPS + 10
    model, optimizer = model_and_optimizer(target, micro_batches=1)
    for batch in batches(steps, optimizer.names):
        sizes = {name: len(x) for name, (x, _) in batch.items()}
        x, y = (torch.cat(parts) for parts in zip(*batch.values(), strict=True))
        with optimizer.stacked(model, sizes):
            errors = error_of(model, x, y).split(list(sizes.values()))
            torch.stack([each.mean() for each in errors]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _, other = train(steps, target)
    torch.testing.assert_close(optimizer.alpha, other.alpha, rtol=1e-9, atol=0)


@pytest.mark.parametrize("passes", [1, 2])
def test_halves_of_a_stacked_head_are_those_of_all_logits(passes):
    """Of an odd batch too, whose larger half changes from pass to pass."""
    rows = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        model = Tiny(tied=True).double()
        optimizer = DoGEOptimizer(
            torch.optim.AdamW(model.parameters()),
            domains=["a", "b"],
            score="aligned",
            micro_batches=None,
        )
        sizes, ids = {"a": 2, "b": 3}, torch.arange(20).view(5, 4) % VOCABULARY
        for _ in range(passes):
            with optimizer.stacked(model, sizes):
                stacked_model = optimizer._step._stacked_model
                assert stacked_model is not None
                assert stacked_model.batch is not None
                # All rows are filled together, from one product of each layer where sizes agree.
                assert len(stacked_model.batch.runs) == 1
                hidden = model.hidden(ids)
                losses_D = (
                    linear_domain_losses(hidden, model.head.weight, ids, sizes)
                    if is_fused
                    else domain_losses(model.head(hidden), ids, sizes)
                )
                assert losses_D.shape == (2,)
                losses_D.sum().backward()
        rows.append([block.rows_BN.clone() for block in optimizer.buffer.blocks])
        optimizer.combine()
        assert optimizer._weights._first_R._vector.tolist() == [0.5, 1 / 3 if passes == 1 else 0.5]
    for ours, theirs in zip(*rows, strict=True):
        assert (ours - theirs).abs().max() <= 1e-14 * theirs.abs().max()


SHORT, ALL = [[3, 10, 7], [10, 10]], [[10, 10], [10, 10]]
ALIKE = {
    "masked": [SHORT],
    "a pass of four, then one of one": [[[10] * 4, [10] * 2], [[10], [10] * 2]],
    "masked, in two passes": [SHORT, ALL, SHORT],
    "a half without targets": [[[0, 10], [10, 10]], ALL],
}


@pytest.mark.parametrize("passes", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("has_numbers", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_halves_weigh_as_the_loss_does(passes, has_numbers, is_fused):
    """Examples that are alike but for their targets: the product of halves has no noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)).double()
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters()),
        domains=["a", "b"],
        score="aligned",
        micro_batches=len(passes),
    )
    in_step = {name: sum(map(sum, both)) for name, *both in zip("ab", *passes, strict=True)}
    for lengths in passes:
        sizes = dict(zip("ab", map(len, lengths), strict=True))
        ids = torch.repeat_interleave(torch.tensor([*sizes.values()]))[:, None].expand(-1, 11)
        targets = torch.tensor([*itertools.chain(*lengths)])[:, None]
        labels = ids.where(torch.arange(11) <= targets, -100)
        number = in_step if has_numbers else None
        with optimizer.stacked(model, sizes):
            # A loss without a gradient has no weight.
            domain_losses(model(ids).detach(), ids, sizes)
            losses_D = (
                linear_domain_losses(
                    model[0](ids), model[1].weight, labels, sizes, num_targets=number
                )
                if is_fused
                else domain_losses(model(ids), labels, sizes, num_targets=number)
            )
            losses_D.sum().backward()
    last = optimizer.last
    assert last is not None
    products, squares = last.gram.diagonal(), last.grad_norms**2
    torch.testing.assert_close(products, squares, rtol=1e-13, atol=0)


@pytest.mark.parametrize("lengths", [[0, 10], [0, 0]], ids=str)
def test_a_half_without_targets_does_not_skip_the_step(lengths):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters()), domains=["a", "b"], score="aligned"
    )
    ids, sizes = torch.ones(4, 11, dtype=torch.int64), {"a": 2, "b": 2}
    labels = ids.clone()
    labels[:2][torch.arange(11) > torch.tensor(lengths)[:, None]] = -100
    with optimizer.stacked(model, sizes):
        domain_losses(model(ids), labels, sizes).sum().backward()
    optimizer.step()
    assert optimizer.num_skipped == 0
    assert optimizer.last.gram[0, 0] == 0


@pytest.mark.parametrize("target", ["universal", {"a": 2.0, "b": 2.0, "c": 2.0}])
def test_for_all_domains_alike_it_is_uniform(target):
    _, optimizer = train(WAITING_STEPS + 40, target)
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() < 1e-12


def exact_mixture(gram_KK: Tensor, gain_K: Tensor) -> Tensor:
    """argmax of W.a / sqrt(a'Ga) over the simplex, of all subsets of domains."""
    best, found_K = -torch.inf, gain_K
    for size in range(1, len(gain_K) + 1):
        for subset in itertools.combinations(range(len(gain_K)), size):
            own = gram_KK[subset, :][:, subset]
            weights = torch.linalg.solve(own, gain_K[list(subset)])
            if (weights > 0).all():
                value = float(gain_K[list(subset)] @ weights / (weights @ own @ weights).sqrt())
                if value > best:
                    best, found_K = value, torch.zeros_like(gain_K)
                    found_K[list(subset)] = weights / weights.sum()
    return found_K


def gram_and_found(
    num_domains: int, num_columns: int, steps: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A matrix, the target's row last, and the weights after steps on it alone."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(num_domains + 1, num_columns, generator=generator, dtype=torch.float64)
    factor += factor[-1] * torch.rand(num_domains + 1, 1, generator=generator)
    gram_RR = factor @ factor.T
    # Equal halves without noise: <a, b> is a quarter of the square of the sum.
    gram = torch.cat([gram_RR, gram_RR.diagonal()[None] / 4])
    tau_R = torch.tensor([0.0] * num_domains + [1.0], dtype=torch.float64)
    state_S = new_state(torch.full((num_domains,), 1 / num_domains, dtype=torch.float64))
    names = Names(
        tau_R, torch.arange(num_domains + 1, dtype=torch.int32), torch.full_like(tau_R, 0.5)
    )
    settings_F = torch.tensor(AlignedSettings(1.0, 0.0), dtype=torch.float64)
    mean_RR, mixture_R = torch.zeros_like(gram_RR), torch.zeros_like(tau_R)
    for _ in range(steps):
        align(Matrices(gram, gram), state_S, mean_RR, mixture_R, names, settings_F)
    return gram_RR, state_views(state_S).alpha


def cosine(gram_RR: Tensor, alpha_K: Tensor) -> float:
    square = (alpha_K @ gram_RR[:-1, :-1] @ alpha_K) * gram_RR[-1, -1]
    return float(gram_RR[:-1, -1] @ alpha_K / square.sqrt())


@pytest.mark.parametrize("seed", range(6))
def test_on_the_same_matrix_it_goes_to_the_exact_maximum(seed):
    gram_RR, found_K = gram_and_found(5, 9, 2000, seed)
    best_K = exact_mixture(gram_RR[:-1, :-1], gram_RR[:-1, -1])
    # No weight is below a hundredth of uniform ones.
    assert (found_K - best_K).abs().max() < 0.01
    assert cosine(gram_RR, found_K) > 0.998 * cosine(gram_RR, best_K)


@pytest.mark.parametrize("num_domains", [7, 50, 200])
def test_four_hundred_steps_bring_the_angle_near_its_least(num_domains):
    gram_RR, found_K = gram_and_found(num_domains, 2 * num_domains, 400, seed=0)
    gram_KK, gain_K = gram_RR[:-1, :-1], gram_RR[:-1, -1]
    best_K = torch.zeros_like(gain_K)
    rate = 1 / torch.linalg.matrix_norm(gram_KK)
    for _ in range(20_000):
        # b >= 0 that minimises b'Gb / 2 - W.b, up to its sum.
        best_K += rate * (gain_K - gram_KK @ best_K)
        best_K.clamp_(min=0)
    least = cosine(gram_RR, torch.full_like(best_K, 1 / num_domains))
    best, found = cosine(gram_RR, best_K), cosine(gram_RR, found_K)
    assert best > found > max(0.995 * best, least)


def test_a_step_that_is_not_finite_moves_nothing():
    model, optimizer = train(WAITING_STEPS + 5, {"far": 1.0})
    before_S = optimizer._weights.state_S.clone()
    (batch,) = batches(1, optimizer.names)
    batch["c"][0][0] = torch.nan
    fill(model, optimizer, batch)
    optimizer.step()
    after_S = optimizer._weights.state_S
    assert optimizer.num_skipped == 1
    assert (after_S != before_S).sum() == 1
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_resumed_run_goes_on_to_the_bit():
    target, names = {"far": 1.0}, (*DOMAINS, "far")
    whole, optimizer = train(WAITING_STEPS + 10, target)
    first, begun = train(WAITING_STEPS + 5, target)
    model, resumed = model_and_optimizer(target)
    model.load_state_dict(first.state_dict())
    resumed.load_state_dict(begun.state_dict())
    for batch in list(batches(WAITING_STEPS + 10, names))[-5:]:
        fill(model, resumed, batch)
        resumed.step()
        resumed.zero_grad()
    assert torch.equal(resumed._weights.state_S, optimizer._weights.state_S)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("keep", [("doge",), ("param_groups",)], ids=["dict", "tuple"])
def test_a_checkpoint_of_another_rule_is_refused(keep):
    _, optimizer = train(2, {"far": 1.0})
    saved = optimizer.state_dict()
    saved = {k: v for k, v in saved.items() if k in (*keep, "state", "param_groups")}
    model, _ = model_and_optimizer({"far": 1.0})
    paper = DoGEOptimizer(torch.optim.AdamW(model.parameters()), domains=DOMAINS, target="far")
    with pytest.raises(ValueError, match="moved by another rule, which keeps 20 numbers"):
        paper.load_state_dict(saved)


def test_a_domain_in_one_piece_is_refused_before_anything_moves():
    model, optimizer = model_and_optimizer(micro_batches=1)
    (batch,) = batches(1, optimizer.names)
    with pytest.raises(RuntimeError, match=r"two halves .* \['a', 'b', 'c'\] came in one piece"):
        fill(model, optimizer, batch)
    assert optimizer.num_steps == 0


@pytest.mark.parametrize(
    "setting",
    [{"mu": 0.1}, {"domain_max_grad_norm": 2.0}, {"domains_per_step": 2}, {"absent": "keep"}],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must keep the default"):
        model_and_optimizer(**setting)


def test_scale_of_the_losses_does_not_matter():
    target, steps = {"far": 1.0}, WAITING_STEPS + 10
    model, optimizer = model_and_optimizer(target, micro_batches=None)
    for batch in batches(steps, optimizer.names):
        for name, (x, y) in batch.items():
            for half in range(2):
                part = slice(half * SIZE // 2, (half + 1) * SIZE // 2)
                with optimizer.domain(name):
                    (1024 * error_of(model, x[part], y[part]).sum() / SIZE).backward()
        optimizer.combine(grad_scale=1024.0)
        for param in model.parameters():
            param.grad /= 1024
        optimizer.step()
        optimizer.zero_grad()
    _, plain = train(steps, target)
    torch.testing.assert_close(optimizer.alpha, plain.alpha, rtol=1e-9, atol=0)


def test_the_combined_gradient_is_clipped_in_the_euclidean_norm():
    model, optimizer = model_and_optimizer({"far": 1.0}, max_grad_norm=0.01)
    for batch in batches(3, optimizer.names):
        fill(model, optimizer, batch)
        norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
        before = float(optimizer.last.combined_norm)
        assert before > 0.1
        assert float(norm) == pytest.approx(0.01 * before / (before + 1e-6), rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()


def test_an_infinite_gradient_outside_the_selection_skips_the_step():
    model, optimizer = model_and_optimizer({"far": 1.0})
    optimizer.release()
    first = next(iter(model.parameters()))
    optimizer = DoGEOptimizer(
        optimizer.inner,
        domains=DOMAINS,
        target={"far": 1.0},
        score="aligned",
        micro_batches=2,
        selection=[first],
    )
    last = list(model.parameters())[-1]
    for number, batch in enumerate(batches(3, optimizer.names)):
        if number == 2:
            last.register_hook(lambda grad: grad * torch.inf)
        fill(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_skipped == 1
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("fault", ["an infinite target", "an overflow of the products"])
def test_a_scaler_backs_off_where_the_sum_is_finite(fault, max_grad_norm, monkeypatch):
    """Its target's coefficient is zero, and products overflow before gradients do."""
    monkeypatch.setenv("DOGE_FAST_BACKEND", "torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**70)
    options = {"max_grad_norm": max_grad_norm, "params_dtype": torch.float32}
    model, optimizer = model_and_optimizer({"far": 1.0}, scaler=scaler, **options)
    (batch,) = batches(1, optimizer.names)
    scale = 2.0**70 if fault.endswith("products") else 1.0
    for name, (x, y) in batch.items():
        for half in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)):
            with optimizer.domain(name):
                error = error_of(model, x[half].float(), y[half].float()).sum() / SIZE
                is_infinite = name == "far" and scale == 1.0
                (scaler.scale(error) * (torch.inf if is_infinite else scale / 2.0**70)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.num_skipped == 1
    assert optimizer.last.combined_norm.isnan()
    assert scaler.get_scale() == 2.0**69


@pytest.mark.parametrize("has_selection", [False, True])
def test_norms_of_domains_are_in_the_metric_and_of_all_columns(has_selection):
    model, optimizer = model_and_optimizer({"far": 1.0})
    params = list(model.parameters())
    if has_selection:
        optimizer.release()
        optimizer = DoGEOptimizer(
            optimizer.inner,
            domains=DOMAINS,
            target={"far": 1.0},
            score="aligned",
            micro_batches=2,
            selection=params[:1],
        )
    for batch in batches(4, optimizer.names):
        optimizer.step()
        optimizer.zero_grad()
        fill(model, optimizer, batch)
    square = 0.0
    x, y = batch["b"]
    for param, grad in zip(
        params, torch.autograd.grad(error_of(model, x, y).mean(), params), strict=True
    ):
        moment = optimizer.inner.state[param]["exp_avg_sq"]
        square += float((grad.square() / (moment.sqrt() + 1e-8)).sum())
    norm = optimizer.last.grad_norms[optimizer.names.index("b")]
    assert float(norm) == pytest.approx(square**0.5, rel=1e-9)
    combined = torch.cat([param.grad.flatten() for param in params]).norm()
    assert float(optimizer.last.combined_norm) == pytest.approx(float(combined), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler_leads_the_same_way(dtype):
    """A scale that is a power of two rounds nothing where nothing overflows."""
    steps, found = WAITING_STEPS + 10, []
    for scale in (1.0, 2.0**10):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        model, optimizer = model_and_optimizer(
            {"far": 1.0}, scaler=scaler, max_grad_norm=1.0, params_dtype=torch.float32
        )
        for batch in batches(steps, optimizer.names):
            for name, (x, y) in batch.items():
                for half in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)):
                    with optimizer.domain(name), torch.autocast("cpu", dtype):
                        error = error_of(model, x[half].float(), y[half].float())
                        scaler.scale(error.sum() / SIZE).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.num_steps == steps
        found.append((optimizer.alpha, optimizer.last.combined_norm))
    (plain_K, plain_norm), (scaled_K, scaled_norm) = found
    assert (plain_K - 1 / len(DOMAINS)).abs().max() > 0.05
    # float16 keeps fewer bits of the smallest gradients, and the scaler divides in float32.
    torch.testing.assert_close(scaled_K, plain_K, rtol=1e-3, atol=0)
    torch.testing.assert_close(scaled_norm, plain_norm, rtol=1e-2, atol=0)


def test_a_share_of_the_first_half_follows_the_counts():
    model, optimizer = model_and_optimizer({"far": 1.0})
    (batch,) = batches(1, optimizer.names)
    for name, (x, y) in batch.items():
        for part, count in ((slice(0, 2), 2), (slice(2, SIZE), SIZE - 2)):
            with optimizer.domain(name, count=count):
                (error_of(model, x[part], y[part]).sum() / SIZE).backward()
    assert optimizer._weights._first_R._vector.tolist() == [0.25] * 4


@pytest.mark.parametrize("optimizer_of", [torch.optim.Adafactor, torch.optim.SGD])
def test_an_optimizer_without_second_moments_takes_steps(optimizer_of):
    _, optimizer = train(5, {"far": 1.0}, inner=optimizer_of)
    assert optimizer.num_steps == 5
    with pytest.warns(UserWarning, match="moves them after 20 steps, and there were 5"):
        assert optimizer.weights["a"] == pytest.approx(1 / 3)


def test_an_eps_that_is_an_int_is_one():
    _, optimizer = train(30, {"far": 1.0}, inner=partial(torch.optim.AdamW, eps=0))
    _, expected = train(30, {"far": 1.0}, inner=partial(torch.optim.AdamW, eps=0.0))
    assert torch.equal(optimizer.alpha, expected.alpha)
    _, euclidean = train(30, {"far": 1.0}, inner=torch.optim.SGD)
    assert not torch.allclose(optimizer.alpha, euclidean.alpha, rtol=1e-3)


def test_weights_that_never_move_are_explained():
    _, optimizer = train(WAITING_STEPS + 1, "universal")
    with pytest.warns(UserWarning, match="equal weights are the answer of the rule 'aligned'"):
        assert optimizer.weights["a"] == pytest.approx(1 / 3)
    model, optimizer = model_and_optimizer({"far": 1.0})
    for batch in batches(WAITING_STEPS + 1, optimizer.names):
        x = batch["far"][0]
        # Nothing is predicted: a loss of zero.
        fill(model, optimizer, batch | {"far": (0 * x, model(0 * x).detach())})
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"every score is zero. .* target \['far'\]"):
        assert optimizer.weights["a"] == pytest.approx(1 / 3)


def test_a_rate_that_moves_no_weights_may_change_before_the_step():
    model, optimizer = model_and_optimizer({"far": 1.0})
    (batch,) = batches(1, optimizer.names)
    fill(model, optimizer, batch)
    optimizer.param_groups[0]["lr"] = 1e-3
    before = model[0].weight.detach().clone()
    optimizer.step()
    # The first step of AdamW moves an element by the rate, and decays it.
    moved = (model[0].weight.detach() - before * (1 - 1e-5)).abs()
    assert float(moved.max()) == pytest.approx(1e-3, rel=1e-3)


def test_a_weight_of_zero_stays_zero():
    initial = {"a": 0.5, "b": 0.5, "c": 0.0}
    _, optimizer = train(WAITING_STEPS + 10, {"far": 1.0}, initial=initial)
    assert optimizer.weights["c"] == 0
    assert optimizer.weights["a"] > 0.6


def test_halves_that_cancel_are_no_overflow():
    """The square of their sum may come out below zero."""
    model, optimizer = model_and_optimizer({"far": 1.0})
    for batch in batches(30, optimizer.names):
        for sign in (1.0, -1.0 + 1e-9):
            for name, (x, y) in batch.items():
                with optimizer.domain(name):
                    (sign * error_of(model, x, y).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_skipped == 0


def test_rows_of_16_bits_lead_the_same_way():
    """Rounded to 8 bits, gradients are within 2^-9 of the rows; AdamW adds up what that moves."""
    target = {"far": 1.0}
    _, exact = train(WAITING_STEPS + 15, target)
    _, rounded = train(WAITING_STEPS + 15, target, buffer_dtype=torch.bfloat16)
    moved = (exact.alpha - 1 / len(DOMAINS)).abs().max()
    assert (rounded.alpha - exact.alpha).abs().max() < 0.1 * moved
