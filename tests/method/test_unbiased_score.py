"""`score="unbiased"`: difficulties of two halves of a batch, and one scale for all gradients."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast import DoGEOptimizer, reference
from doge_fast.stacked.losses import domain_losses, linear_domain_losses
from doge_fast.weights import checkpoint
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import UNBIASED, Score
from doge_fast.weights.subset import Subset

WIDTH, SIZE, MU, LR = 5, 4, 0.02, 0.05
NAMES = ["a", "b", "c"]
TO_ROUNDING = {"rtol": 1e-10, "atol": 1e-12}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def batch(name: str, step: int) -> Tensor:
    """[SIZE, WIDTH]; of another size in each domain, and larger in one step."""
    generator = torch.Generator().manual_seed(100 * step + ord(name))
    size = 10.0 if (name, step) == ("a", 3) else {"a": 1.0, "b": 2.0, "c": 0.5, "x": 1.0}[name]
    return size * torch.randn(SIZE, WIDTH, dtype=torch.float64, generator=generator)


def example_losses(model: nn.Module, inputs_BW: Tensor) -> Tensor:
    output: Tensor = model(inputs_BW)
    return (output - inputs_BW.roll(1, 1)).square().mean(1)


def optimizer_of(model: nn.Module, **options: Any) -> DoGEOptimizer:
    usual = {"domains": NAMES, "mu": MU, "score": "unbiased", "micro_batches": 2}
    inner = torch.optim.SGD(model.named_parameters(), lr=LR)
    return DoGEOptimizer(inner, **(usual | options))


def run_by_halves(
    optimizer: DoGEOptimizer, model: nn.Module, step: int, scale: float = 1.0
) -> None:
    for name in (*optimizer.domains_of_step, *optimizer.objective.measured):
        for half in batch(name, step).chunk(2):
            with optimizer.domain(name):
                (scale * example_losses(model, half).mean() / 2).backward()


def run_stacked(optimizer: DoGEOptimizer, model: nn.Module, step: int) -> None:
    sizes = {name: SIZE for name in optimizer.rows}
    inputs_BW = torch.cat([batch(name, step) for name in sizes])
    with optimizer.stacked(model, sizes):
        (example_losses(model, inputs_BW).view(len(sizes), SIZE).mean(1).sum()).backward()


def half_gradients(model: nn.Module, name: str, step: int) -> list[Tensor]:
    """Of the mean over the whole batch, from each half of it."""
    parameters = list(model.parameters())
    losses = [example_losses(model, half).mean() / 2 for half in batch(name, step).chunk(2)]
    grads = [torch.autograd.grad(loss, parameters) for loss in losses]
    return [torch.cat([each.flatten() for each in parts]) for parts in grads]


class Twin:
    """The same in the open: every gradient as a row, with `doge_fast.reference`."""

    def __init__(self, targets: Mapping[str, float], score: Score, selected: slice) -> None:
        self.model = model_of()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.score, self.selected = score, selected
        self.measured = [name for name in targets if name not in NAMES]
        rows = [*NAMES, *self.measured]
        self.tau_R = torch.tensor([targets.get(name, 0.0) for name in rows], dtype=torch.float64)
        self.alpha_K = torch.full((3,), 1 / 3, dtype=torch.float64)
        self.mean_K = torch.zeros_like(self.alpha_K)
        self.running_R: Tensor | None = None
        self.steps = 0

    def step(self, step: int) -> None:
        self.steps += 1
        halves_FN = torch.stack([h for n in NAMES for h in half_gradients(self.model, n, step)])
        rows_KN, _ = reference.of_halves(halves_FN)
        _, own_K = reference.of_halves(halves_FN[:, self.selected])
        measured = [sum(half_gradients(self.model, name, step)) for name in self.measured]
        rows_RN = torch.cat([rows_KN, *(row[None] for row in measured)])
        norms_R, scale = rows_RN.norm(dim=1), torch.ones(())
        if self.score.has_common_scale:
            before_R = norms_R if self.running_R is None else self.running_R
            factors_R, scale, self.running_R = reference.common_scale(
                norms_R, before_R, self.steps, 3
            )
        else:
            factors_R = reference.clip_factors(norms_R, 1.0)
        gram_RR = reference.gram((factors_R[:, None] * rows_RN / scale)[:, self.selected])
        if self.score.is_unbiased:
            gram_RR.diagonal()[:3] = own_K * (factors_R[:3] / scale) ** 2
        self.gain_K = reference.gain(gram_RR, self.tau_R, 3)
        self.alpha_K = reference.mirror_step(self.alpha_K, self.gain_K, LR, MU)
        self.mean_K += (self.alpha_K - self.mean_K) / self.steps
        gradient_N = (self.alpha_K * factors_R[:3]) @ rows_RN[:3]
        start = 0
        for param in self.model.parameters():
            param.grad = gradient_N[start : start + param.numel()].view_as(param)
            start += param.numel()
        self.inner.step()


@pytest.mark.parametrize(
    "score", [UNBIASED, Score(is_unbiased=True), Score(has_common_scale=True)], ids=str
)
@pytest.mark.parametrize("target", ["universal", "x", {"a": 1.0, "x": 0.5}], ids=str)
@pytest.mark.parametrize("is_selected", [False, True])
def test_weights_scores_and_model_are_those_of_the_reference(
    score: Score, target: Any, is_selected: bool
) -> None:
    model = model_of()
    layer = ["2.weight", "2.bias"] if is_selected else None
    optimizer = optimizer_of(model, target=target, score=score, selection=layer)
    targets = dict.fromkeys(NAMES, 1.0) if target == "universal" else target
    targets = {target: 1.0} if target == "x" else targets
    twin = Twin(targets, score, slice(30, None) if is_selected else slice(None))
    for step in range(6):
        run_by_halves(optimizer, model, step)
        optimizer.step()
        optimizer.zero_grad()
        twin.step(step)
        assert optimizer.last is not None
        torch.testing.assert_close(optimizer.last.gain, twin.gain_K, **TO_ROUNDING)
        torch.testing.assert_close(optimizer.alpha, twin.alpha_K, **TO_ROUNDING)
        for ours, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **TO_ROUNDING)
    torch.testing.assert_close(optimizer.alpha_mean, twin.mean_K, **TO_ROUNDING)
    assert (optimizer.alpha - 1 / 3).abs().max() > 1e-3


def test_what_is_told_of_a_step_is_of_whole_gradients() -> None:
    model = model_of()
    optimizer = optimizer_of(model, score=Score(is_unbiased=True))
    halves_FN = torch.stack([h for n in NAMES for h in half_gradients(model, n, 0)])
    rows_KN, own_K = reference.of_halves(halves_FN)
    run_by_halves(optimizer, model, 0)
    last = optimizer.last
    assert last is not None
    norms_K = rows_KN.norm(dim=1)
    factors_K = reference.clip_factors(norms_K, 1.0)
    torch.testing.assert_close(last.grad_norms, norms_K, **TO_ROUNDING)
    cut_KN = factors_K[:, None] * rows_KN
    torch.testing.assert_close(last.gram, cut_KN @ cut_KN.T, **TO_ROUNDING)
    torch.testing.assert_close(last.difficulty, own_K * factors_K**2, **TO_ROUNDING)
    assert not torch.allclose(last.difficulty, last.gram.diagonal())


def test_halves_of_pure_noise_have_no_difficulty_in_the_mean() -> None:
    """The square of a norm is all noise here; its mean is 20, that of ours is 0."""
    subset = Subset.of(Objective.of(["a"]), None, 0, UNBIASED)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2000):
        rows_FN = torch.randn(2, 10, generator=generator, dtype=torch.float64)
        products = subset.spread(rows_FN @ rows_FN.T, None)
        assert products.own_R is not None
        found.append(torch.stack([products.own_R[0], products.gram_RR[0, 0]]))
    own, square = torch.stack(found).mean(0).tolist()
    # The standard error of the mean of 4 <a, b> is 4 sqrt(10 / 2000).
    assert abs(own) < 4 * 4 * (10 / 2000) ** 0.5
    assert square == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize("target", ["universal", "x"])
def test_a_stacked_pass_cuts_the_batch_in_halves_itself(target: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, target=target)
    stacked_model = copy.deepcopy(model)
    stacked = optimizer_of(stacked_model, target=target, micro_batches=1)
    for step in range(4):
        run_by_halves(optimizer, model, step)
        run_stacked(stacked, stacked_model, step)
        for each in (optimizer, stacked):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(stacked.alpha, optimizer.alpha, **TO_ROUNDING)
    for ours, theirs in zip(stacked_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **TO_ROUNDING)


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_loss_of_a_head_knows_halves(is_fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7)).double()
    tokens_BL = torch.randint(7, (8, 6))
    sizes = {"a": 2, "b": 4, "c": 2}
    by_halves = copy.deepcopy(model)
    halves = optimizer_of(by_halves)
    for name, rows in zip(sizes, tokens_BL.split(list(sizes.values())), strict=True):
        for half in rows.chunk(2):
            with halves.domain(name):
                logits = by_halves(half)[:, :-1].flatten(0, 1)
                (F.cross_entropy(logits, half[:, 1:].flatten()) / 2).backward()
    optimizer = optimizer_of(model, micro_batches=1)
    with optimizer.stacked(model, sizes):
        if is_fused:
            hidden, head = model[0](tokens_BL), model[1]
            losses = linear_domain_losses(hidden, head.weight, tokens_BL, sizes, bias_V=head.bias)
        else:
            losses = domain_losses(model(tokens_BL), tokens_BL, sizes)
        losses.sum().backward()
    assert optimizer.last is not None
    assert halves.last is not None
    torch.testing.assert_close(optimizer.last.gram, halves.last.gram, **TO_ROUNDING)
    torch.testing.assert_close(optimizer.last.difficulty, halves.last.difficulty, **TO_ROUNDING)


def test_sizes_that_only_add_up_to_the_batch_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7)).double()
    optimizer = optimizer_of(model, domains=[*"abcd"], score="paper", micro_batches=1)
    tokens_BL = torch.randint(7, (8, 6))
    with (
        pytest.raises(ValueError, match="sizes must be those of its batch"),
        optimizer.stacked(model, dict.fromkeys("abcd", 2)),
    ):
        linear_domain_losses(model[0](tokens_BL), model[1].weight, tokens_BL, {"a": 4, "b": 4})


def test_few_of_many_domains_have_halves_too() -> None:
    """In the mean over all draws W is that of all domains, as without halves."""
    options: dict[str, Any] = {"score": Score(is_unbiased=True), "domain_max_grad_norm": None}
    model = model_of()
    whole = optimizer_of(model, **options)
    run_by_halves(whole, model, 0)
    assert whole.last is not None
    gains: dict[tuple[str, ...], Tensor] = {}
    for seed in range(30):
        model = model_of()
        optimizer = optimizer_of(model, domains_per_step=2, seed=seed, **options)
        run_by_halves(optimizer, model, 0)
        assert optimizer.buffer.num_rows == 4
        assert optimizer.last is not None
        gains[optimizer.domains_of_step] = optimizer.last.gain
    assert len(gains) == 3
    for place, name in enumerate(NAMES):
        mean = torch.stack([gain[place] for drawn, gain in gains.items() if name in drawn]).mean()
        torch.testing.assert_close(mean, whole.last.gain[place], **TO_ROUNDING)


def test_targets_that_are_measured_need_no_halves() -> None:
    model = model_of()
    optimizer = optimizer_of(model, target="x", micro_batches=1)
    for name in optimizer.rows:
        with optimizer.domain(name):
            example_losses(model, batch(name, 0)).mean().backward()
    optimizer.step()
    assert optimizer.buffer.num_rows == 4
    assert optimizer.num_steps == 1


def test_the_factor_of_a_scaler_changes_nothing() -> None:
    models = [model_of(), model_of()]
    plain, scaled = optimizers = [optimizer_of(each, micro_batches=None) for each in models]
    for step in range(3):
        for optimizer, model, scale in zip(optimizers, models, (1.0, 1024.0), strict=True):
            run_by_halves(optimizer, model, step, scale=scale)
            optimizer.combine(grad_scale=scale)
            optimizer.zero_grad()
    torch.testing.assert_close(scaled.alpha, plain.alpha, **TO_ROUNDING)
    ours, theirs = scaled.doge.state_dict(), plain.doge.state_dict()
    torch.testing.assert_close(ours["norms"], theirs["norms"], **TO_ROUNDING)


def test_a_skipped_step_moves_no_norm() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    run_by_halves(optimizer, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.doge.state_dict()
    run_by_halves(optimizer, model, 1, scale=float("inf"))
    optimizer.step()
    after = optimizer.doge.state_dict()
    assert int(after["num_skipped"]) == 1
    assert torch.equal(after["norms"], before["norms"])
    assert torch.equal(after["alpha"], before["alpha"])


def test_an_absent_domain_keeps_its_norm() -> None:
    model = model_of()
    optimizer = optimizer_of(model, absent="keep", micro_batches=None)
    for step in range(3):
        for name in NAMES if step == 1 else "ac":
            for half in batch(name, step).chunk(2):
                with optimizer.domain(name):
                    (example_losses(model, half).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms_R = optimizer.doge.state_dict()["norms"]
        if step == 0:
            assert norms_R[1] == 0.0
        if step == 1:
            kept = norms_R[1]
            assert kept > 0.0
    assert norms_R[1] == kept
    assert bool(optimizer.alpha.isfinite().all())


@pytest.mark.parametrize("form", ["whole", "groups"])
@pytest.mark.parametrize("target", ["universal", "worst"])
def test_a_checkpoint_goes_on_to_the_bit(form: str, target: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, target=target)
    for step in range(3):
        run_by_halves(optimizer, model, step)
        optimizer.step()
        optimizer.zero_grad()
    saved, again = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    if form == "groups":
        del saved[checkpoint.KEY]
    loaded = optimizer_of(again, target=target)
    loaded.load_state_dict(saved)
    for each, its_model in ((optimizer, model), (loaded, again)):
        run_by_halves(each, its_model, 3)
        each.step()
    ours, theirs = loaded.doge.state_dict(), optimizer.doge.state_dict()
    for name in ("alpha", "alpha_mean", "gain", "norms"):
        assert torch.equal(ours[name], theirs[name]), name


def test_norms_of_a_checkpoint_are_checked() -> None:
    optimizer = optimizer_of(model_of())
    saved = optimizer.doge.state_dict()
    for norms in ([1.0, 2.0], [1.0, float("nan"), 1.0], [1.0, -1.0, 1.0]):
        with pytest.raises(ValueError, match="norms must be 3 finite norms"):
            optimizer.doge.load_state_dict(saved | {"norms": torch.tensor(norms)})
    with pytest.raises(ValueError, match="norms must be a tensor"):
        optimizer.doge.load_state_dict(saved | {"norms": [1.0, 1.0, 1.0]})


def test_a_state_of_another_score_begins_with_new_norms() -> None:
    model = model_of()
    paper = optimizer_of(model, score="paper", micro_batches=1)
    optimizer = optimizer_of(model)
    optimizer.doge.load_state_dict(paper.doge.state_dict())
    run_by_halves(optimizer, model, 0)
    assert (optimizer.doge.state_dict()["norms"] > 0).all()


def test_batches_without_halves_are_refused() -> None:
    model = model_of()
    optimizer = optimizer_of(model, micro_batches=None)
    for name in NAMES:
        for half in batch(name, 0).chunk(2 if name == "a" else 1):
            with optimizer.domain(name):
                example_losses(model, half).mean().backward()
    with pytest.raises(RuntimeError, match=r"\['b', 'c'\] were entered an odd number of times"):
        optimizer.step()
    optimizer.zero_grad()
    odd = {"a": 2, "b": 3, "c": 2}
    with (
        pytest.raises(ValueError, match=r"even number of examples on every rank; got \{'b': 3\}"),
        optimizer.stacked(model, odd),
    ):
        pass
    run_by_halves(optimizer, model, 0)
    optimizer.step()
    assert optimizer.num_steps == 1


def test_what_comes_alone_and_in_a_stacked_pass_stays_in_halves() -> None:
    model = model_of()
    optimizer = optimizer_of(model, micro_batches=None)
    run_stacked(optimizer, model, 0)
    run_by_halves(optimizer, model, 1)
    run_stacked(optimizer, model, 2)
    optimizer.combine()
    halves = []
    for name in NAMES:
        firsts_and_seconds = [half_gradients(model, name, step) for step in range(3)]
        halves += [sum(each) for each in zip(*firsts_and_seconds, strict=True)]
    _, own_K = reference.of_halves(torch.stack(halves))
    last = optimizer.last
    assert last is not None
    norms_K = torch.stack(halves).view(3, 2, -1).sum(1).norm(dim=1)
    torch.testing.assert_close(last.difficulty, own_K / norms_K.mean() ** 2, **TO_ROUNDING)


def test_the_name_is_recorded() -> None:
    optimizer = optimizer_of(model_of())
    assert optimizer.rule.score == UNBIASED
    assert optimizer.rule.score.name == "unbiased"
