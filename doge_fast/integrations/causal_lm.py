"""Causal language models of transformers: which can run in a stacked pass, and their loss."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from doge_fast.flat_buffer import on_device
from doge_fast.integrations.domain_data import Batch
from doge_fast.losses import IGNORED, domain_losses, linear_domain_losses

# Architectures whose head does not scale or cap its logits.
PLAIN_HEADS = ("gpt2", "llama", "qwen2", "mistral", "gpt_neox")
# Architectures whose stacked gradients are tested against sequential ones.
STACKABLE = (*PLAIN_HEADS, "gemma2")
# The keys that a stacked batch may have; the first axis of each tensor is the examples.
STACKABLE_KEYS = {"input_ids", "labels", "attention_mask"}
# "auto" stacks domains of at most so many tokens in a micro-batch. Measured on a CPU (`python -m
# benchmarks.stacked`, docs/decisions.md). Not measured elsewhere: a domain with more tokens should
# occupy a GPU by itself.
MOST_TOKENS = {"cpu": 256}
MOST_TOKENS_ELSEWHERE = 4096
# The limit for all domains together, whose activations are in memory at the same time.
MOST_TOKENS_TOGETHER = 32768
# With more bytes of float32 logits, a plain head computes the logits of one domain at a time.
MOST_LOGITS_BYTES = {"cpu": 64 << 20}
MOST_LOGITS_BYTES_ELSEWHERE = 4 << 30


def shifts_labels(model: Any) -> bool:
    """Whether the model's own loss predicts token i + 1 from the tokens up to i.

    Trainer reads `model.loss_type`, which is None for some causal models (GPT-2). `loss_function`
    alone does not tell either: every model has it, and some never call it (Pegasus).
    """
    is_causal = getattr(model, "loss_function", None) is ForCausalLMLoss
    # Under adapters of peft, then under torch.compile.
    get_base_model = getattr(model, "get_base_model", None)
    model = get_base_model() if get_base_model else model
    is_called = _calls_loss_function(type(getattr(model, "_orig_mod", model)))
    return is_causal and is_called and not getattr(model.config, "is_encoder_decoder", False)


def _calls_loss_function(kind: type) -> bool:
    """Whether the class's forward, or that of a base class that it calls, has this name."""
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("forward", base)), "__code__", None)
        if code is None:
            continue
        if "loss_function" in code.co_names or "forward" not in code.co_names:
            return "loss_function" in code.co_names
    return False


def has_own_forward(model: Any) -> bool:
    """Whether forward is not that of transformers or peft, so that its loss may be another.

    peft's calls the model's, but with further tokens where it learns a prompt.
    """
    # Under autocast accelerate replaces forward and keeps this one.
    forward = getattr(model, "_original_forward", model.forward)
    package = str(getattr(forward, "__module__", "")).partition(".")[0]
    adapter = getattr(model, "active_peft_config", None)
    return package not in ("transformers", "peft") or getattr(adapter, "is_prompt_learning", False)


def num_targets(
    batches: Iterable[Mapping[str, Batch]],
    names: Sequence[str],
    device: torch.device,
    *,
    is_shifted: bool,
) -> Tensor:
    """[R] number of predicted tokens of each domain in a step's micro-batches; 0 without labels.

    The order is that of `names`. With `is_shifted` the model shifts the labels, so the first one is
    not predicted.
    """
    counts: dict[str, Tensor] = {}
    for micro_batch in batches:
        for name, batch in micro_batch.items():
            if "labels" not in batch:
                continue
            labels = batch["labels"][..., 1:] if is_shifted else batch["labels"]
            # A collator that packs several texts into one sequence shifts the labels itself.
            targets = batch.get("shift_labels", labels)
            counts[name] = counts.get(name, 0) + targets.ne(IGNORED).sum()
    if not counts:
        return torch.zeros(len(names), dtype=torch.int64, device=device)
    zero = torch.zeros_like(next(iter(counts.values())))
    return on_device(torch.stack([counts.get(name, zero) for name in names]), device)


def unstackable_reason(inputs: Mapping[str, Batch]) -> str | None:
    """Why the domains of a micro-batch cannot share a pass; None if they can."""
    kinds = {frozenset(batch) for batch in inputs.values()}
    if len(kinds) != 1 or not {"input_ids", "labels"} <= (keys := next(iter(kinds))):
        return "takes input_ids and labels of every domain; some domain lacks them."
    if not keys <= STACKABLE_KEYS:
        return f"takes {', '.join(sorted(STACKABLE_KEYS))}; got {', '.join(sorted(keys))}."
    lengths = {tuple(batch["input_ids"].shape[1:]) for batch in inputs.values()}
    if len(lengths) != 1:
        return f"takes sequences of one length; got {sorted(lengths)}."
    return None


def is_tested(model: Any) -> bool:
    """Whether stacked passes are tested for this architecture."""
    return getattr(getattr(model, "config", None), "model_type", None) in STACKABLE


def gains_by_stacking(inputs: Mapping[str, Batch], device: torch.device | str) -> bool:
    """Whether a stacked pass of all domains is expected to be faster.

    It depends on shapes alone, so a resumed run makes the same choice. The batches have no
    `unstackable_reason`.
    """
    tokens: list[int] = [batch["input_ids"].numel() for batch in inputs.values()]
    most = MOST_TOKENS.get(torch.device(device).type, MOST_TOKENS_ELSEWHERE)
    return max(tokens) <= most and sum(tokens) <= MOST_TOKENS_TOGETHER


def stacked_losses(
    model: Any,
    unwrapped: Any,
    body: Any,
    batches: Mapping[str, Batch],
    num_targets: Mapping[str, Any] | None,
) -> Tensor:
    """[D] mean next-token losses of the domains, from one forward pass of `model`.

    `unwrapped` is the same model without wrappers, and `body` the model without its head, which a
    plain head with many logits follows. The batches have no `unstackable_reason`.
    `num_targets` are those of the optimizer step by domain; None: of these batches.
    """
    sizes = {name: len(batch["input_ids"]) for name, batch in batches.items()}
    keys = next(iter(batches.values()))
    inputs = {key: torch.cat([batch[key] for batch in batches.values()]) for key in keys}
    labels = inputs.pop("labels")
    most = MOST_LOGITS_BYTES.get(labels.device.type, MOST_LOGITS_BYTES_ELSEWHERE)
    has_many_logits = 4 * labels.numel() * unwrapped.config.vocab_size > most
    head = unwrapped.get_output_embeddings()
    if has_many_logits and _is_plain(unwrapped, head):
        hidden = body(**inputs, use_cache=False).last_hidden_state
        return linear_domain_losses(hidden, head.weight, labels, sizes, num_targets=num_targets)
    logits = model(**inputs, use_cache=False).logits
    return domain_losses(logits, labels, sizes, num_targets=num_targets)


def _is_plain(model: Any, head: Any) -> bool:
    """Whether the logits are the head's weight times the last hidden states, and nothing else."""
    is_known = isinstance(model, PreTrainedModel) and model.config.model_type in PLAIN_HEADS
    has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in (model, head))
    return is_known and type(head) is nn.Linear and head.bias is None and not has_hooks
