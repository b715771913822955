"""Norms per example equal those of one backward per example, and scores are the paper's sums."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from doge_fast.cancellation import READINGS, CancellationEffect, Reading, select
from doge_fast.stacked import example_norms
from doge_fast.stacked.example_norms import ExampleNorms
from doge_fast.stacked.layers import registry
from tests.method.architectures import OWN_RULES, WITH_RULES, ids_of, made, mean_loss
from tests.models import domain_tokens, tied_transformer
from tests.packages import installed

transformers = installed("transformers")


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {**registry._RULES, **OWN_RULES})


# Of sums of products of float64, over thousands of terms.
EXACT = {"rtol": 1e-10, "atol": 1e-22}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12, "vocab_size": 32}
    without = dict.fromkeys(("bos_token_id", "eos_token_id"))
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(**shape, **without, **dropout)
    return transformers.GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM(config).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    **{kind: partial(made, kind) for kind in WITH_RULES},
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over tokens, of a model of transformers or of ours."""
    # transformers' own loss is in float32, whatever the model is in.
    logits = model(input_ids=tokens).logits if hasattr(model, "config") else model(tokens)
    return logits if logits.dim() == 0 else mean_loss(logits, tokens)


def tokens_of(num_examples: int = 3, step: int = 0, length: int = 12) -> Tensor:
    return domain_tokens(0, step, batch=num_examples, length=length)


def by_loop(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """{name: [B, *shape]}: the gradient of each example, one backward for each."""
    names, params = zip(*model.named_parameters(), strict=True)
    rows = [
        torch.autograd.grad(loss_of(model, row[None]), params, materialize_grads=True)
        for row in tokens
    ]
    return {name: torch.stack(each) for name, *each in zip(names, *rows, strict=True)}


def norms(grads: Tensor) -> Tensor:
    return grads.flatten(1).norm(dim=1)


def recorded(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """{name: [B]} norms of the gradients of a mean over examples, times B."""
    recorder = ExampleNorms(model, dict(model.named_parameters()))
    with recorder.recording(len(tokens)):
        loss_of(model, tokens).backward()
    return {name: squared.sqrt() * len(tokens) for name, squared in recorder.squared.items()}


@pytest.mark.parametrize("most", [1 << 25, 2 * 16 * 40, 1], ids=["at once", "in twos", "single"])
@pytest.mark.parametrize("kind", MODELS)
def test_norms_are_those_of_one_backward_per_example(
    kind: str, most: int, own_rules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_norms, "MOST_ELEMENTS", most)
    model = MODELS[kind]()
    tokens = tokens_of() if kind in ("gpt2", "llama") else ids_of({"a": 3})
    found, exact = recorded(model, tokens), by_loop(model, tokens)
    assert found.keys() == exact.keys()
    # llama's norms are in float32 inside.
    bounds = {"rtol": 1e-5, "atol": 1e-9} if kind == "llama" else EXACT
    for name, grads in exact.items():
        torch.testing.assert_close(found[name], norms(grads), **bounds, msg=name)


def test_the_gradient_itself_is_untouched_and_no_hook_stays() -> None:
    plain, model, tokens = gpt2(), gpt2(), tokens_of()
    loss_of(plain, tokens).backward()
    recorded(model, tokens)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-18)
    assert not any(module._forward_hooks for module in model.modules())


def test_bfloat16_norms_are_as_good_as_its_gradients() -> None:
    model, tokens = gpt2().float(), tokens_of()
    # Backward under autocast too, which must not reach the products of ours.
    with torch.autocast("cpu", torch.bfloat16):
        exact = by_loop(model, tokens)
        found = recorded(model, tokens)
    for name, grads in exact.items():
        if "attn.c_attn.bias" in name:
            continue
        # Roundings of half an ulp, 2^-9, at each of the few products on the way.
        torch.testing.assert_close(found[name], norms(grads), rtol=2**-4, atol=1e-4, msg=name)


def test_a_parameter_that_something_else_uses_is_noticed() -> None:
    """In the first pass; what `p.grad` held before does not matter."""
    for model, is_right in ((tied_transformer(), False), (gpt2(), True)):
        loss_of(model, tokens_of(step=1)).backward()
        if is_right:
            recorded(model, tokens_of())
        else:
            with pytest.raises(RuntimeError, match=r"embedding\.weight"):
                recorded(model, tokens_of())


def test_a_gradient_of_rounding_errors_alone_is_no_other_use() -> None:
    """What a softmax does not see, as the bias of an attention's keys."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    recorder = ExampleNorms(model, dict(model.named_parameters()))
    x = torch.randn(4, 50, 8)
    with recorder.recording(4):
        model(x).squeeze(-1).softmax(1).square().sum().backward()
    assert (recorder.squared["1.bias"] < 1e-10).all()
    assert (recorder.squared["1.weight"] > 1e-8).all()


def test_what_has_no_norms_per_example_is_refused() -> None:
    single = nn.Linear(3, 1)
    recorder = ExampleNorms(single, dict(single.named_parameters()))
    says = r"the 4 examples.* Linear .*\[7, 3\]"
    with pytest.raises(RuntimeError, match=says), recorder.recording(4):
        single(torch.randn(7, 3))
    with pytest.raises(RuntimeError, match="single backward pass"), recorder.recording(2):
        backward_twice(single(torch.randn(2, 3)).mean())


def backward_twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


# The score.


def by_definition(steps: int, *, lr: float = 0.1) -> dict[Reading, dict[str, float]]:
    """C(w) from gradients of every example and copies of the weights, in every reading."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    found: dict[Reading, dict[str, float]] = {
        reading: dict.fromkeys(dict(model.named_parameters()), 0.0) for reading in READINGS
    }
    for step in range(steps):
        optimizer.zero_grad()
        tokens = tokens_of(step=step)
        grads = by_loop(model, tokens)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        loss_of(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for name, param in model.named_parameters():
            change = float((param.detach() - before[name]).norm())
            of_each = float(norms(grads[name]).sum())
            of_sum = float(grads[name].sum(0).norm())
            found["norms-over-change"][name] += of_each / change
            found["sum-over-change"][name] += of_sum / change
            found["change-over-sum"][name] += change / of_sum
            found["change-over-norms"][name] += change / of_each
    return found


def follow(
    steps: int, *, parts: tuple[int, ...] = (3,), model: nn.Module | None = None, first: int = 0
) -> tuple[CancellationEffect, nn.Module, torch.optim.Optimizer]:
    """The same loop with the batch in parts of so many examples."""
    model = gpt2() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    effect = CancellationEffect(model, optimizer)
    go_on(effect, model, optimizer, range(first, first + steps), parts)
    return effect, model, optimizer


def go_on(
    effect: CancellationEffect,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    parts: tuple[int, ...] = (3,),
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for tokens in tokens_of(step=step).split(parts):
            with effect.watching(len(tokens), weight=1 / 3):
                (loss_of(model, tokens) * len(tokens) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("parts", [(3,), (2, 1), (1, 1, 1)], ids=str)
def test_every_reading_is_its_definition(parts: tuple[int, ...]) -> None:
    exact = by_definition(3)
    effect, _, _ = follow(3, parts=parts)
    for reading in READINGS:
        scores = effect.scores(reading)
        assert list(scores) == list(exact[reading])
        for name, score in exact[reading].items():
            # AdamW's steps amplify rounding in gradients that are near zero.
            assert scores[name] == pytest.approx(score, rel=1e-8), (reading, name)
        assert set(effect.terms(reading).values()) == {3}


def test_a_step_that_moves_nothing_adds_no_term() -> None:
    effect, model, optimizer = follow(1)
    before = effect.scores()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    go_on(effect, model, optimizer, range(1, 2))
    assert effect.num_steps == 2
    assert effect.scores() == before
    assert set(effect.terms().values()) == {1}
    # A ratio over the gradient is zero then, and a term.
    assert set(effect.terms("change-over-sum").values()) == {2}
    # Nor does an unwatched step, or any after the release.
    optimizer.step()
    effect.release()
    go_on(effect, model, optimizer, range(2, 3))
    assert (effect.num_steps, effect.scores()) == (2, before)


def test_a_saved_and_loaded_effect_goes_on_to_the_same_bits() -> None:
    whole, _, _ = follow(4)
    first, model, optimizer = follow(2)
    second = CancellationEffect(model, optimizer)
    second.load_state_dict(first.state_dict())
    first.release()
    go_on(second, model, optimizer, range(2, 4))
    for reading in READINGS:
        assert second.scores(reading) == whole.scores(reading)
        assert second.terms(reading) == whole.terms(reading)
    other = nn.Linear(2, 2)
    effect = CancellationEffect(other, torch.optim.SGD(other.parameters()))
    with pytest.raises(ValueError, match="scores of shape"):
        effect.load_state_dict(first.state_dict())


def test_parameters_that_are_not_stepped_are_not_scored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].bias, *model[1].parameters()], lr=0.1)
    effect = CancellationEffect(model, optimizer)
    with effect.watching(3):
        model(torch.randn(3, 2)).mean().backward()
    optimizer.step()
    assert effect.columns == {"0.bias": 2, "1.weight": 2}
    assert all(score > 0 for score in effect.scores().values())


def test_the_model_without_rule_is_refused_for_several_examples_only() -> None:
    model = nn.Bilinear(3, 3, 1)
    effect = CancellationEffect(model, torch.optim.SGD(model.parameters()))
    assert effect.without_rule == ["the model (Bilinear)"]
    with pytest.raises(ValueError, match="Bilinear"), effect.watching(2):
        pass
    with effect.watching(1):
        model(torch.randn(1, 3), torch.randn(1, 3)).sum().backward()


def test_misuse_speaks() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    effect = CancellationEffect(model, optimizer)
    with pytest.raises(RuntimeError, match="No step has been watched"):
        effect.scores()
    for count, weight, said in ((0, None, "at least 1; got 0"), (1, -1, "than zero; got -1")):
        with pytest.raises(ValueError, match=said), effect.watching(count, weight=weight):
            pass
    with effect.watching(2):
        model(torch.randn(2, 2)).mean().backward()
    with pytest.raises(ValueError, match="weight"), effect.watching(4):
        pass
    optimizer.step()
    with pytest.raises(ValueError, match=r"reading must be one of norms-over-change, .*'words'"):
        effect.scores("words")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="they share none"):
        CancellationEffect(nn.Linear(1, 1), optimizer)
    coupled = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="1 is a BatchNorm1d, whose statistics mix"):
        CancellationEffect(coupled, torch.optim.SGD(coupled.parameters()))
    CancellationEffect(coupled.eval(), torch.optim.SGD(coupled.parameters()))


# Selection.

SCORES = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 2.0}
COLUMNS = {"a": 10, "b": 20, "c": 30, "d": 40}


@pytest.mark.parametrize(
    ("strategy", "names", "num_columns"),
    [("low1", "b", 20), ("low3", "bad", 70), ("high2", "ca", 40), ("high4", "cadb", 100)],
)
def test_select(strategy: str, names: str, num_columns: int) -> None:
    for scores in (SCORES, dict(reversed(SCORES.items()))):
        found = select(scores, strategy, columns=COLUMNS)
        assert found.names == tuple(names)
        assert (found.num_columns, found.share) == (num_columns, num_columns / 100)


@pytest.mark.parametrize(
    ("strategy", "changes", "text"),
    [
        ("low5", {}, "low5 selects 5 parameters; the model has 4"),
        ("low0", {}, "got 'low0'"),
        ("middle3", {}, "got 'middle3'"),
        ("low1", {"b": math.nan}, "that of b is nan"),
    ],
)
def test_select_refuses(strategy: str, changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        select(SCORES | changes, strategy, columns=COLUMNS)


def test_the_paper_s_proxy_has_76_modules() -> None:
    """6 layers, width 768: the 82M proxy of the paper's appendix."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6, n_embd=768))
        effect = CancellationEffect(model, torch.optim.SGD(model.parameters()))
    assert len(effect.columns) == 76
    assert effect.without_rule == []
