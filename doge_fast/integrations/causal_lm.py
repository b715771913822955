"""Causal language models of transformers: when one pass may serve all domains, and its losses."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from doge_fast.integrations.domain_data import Batch, checked_batch
from doge_fast.losses import IGNORED, domain_losses, linear_domain_losses

# Architectures whose rows in a stacked batch are tested against one domain after another.
STACKABLE = ("gpt2", "llama", "qwen2", "mistral", "gpt_neox", "gemma2")
# Those of them whose head is a product and nothing else.
PLAIN_HEADS = ("gpt2", "llama", "qwen2", "mistral", "gpt_neox")
# All that a stacked batch may hold; each a tensor whose first axis are the examples.
STACKABLE_KEYS = {"input_ids", "labels", "attention_mask"}
# Tokens of a domain in a micro-batch up to which one backward pass for all is chosen. On a CPU as
# measured (`python -m benchmarks.stacked`, docs/decisions.md). The value elsewhere is not measured
# yet: a domain of more tokens occupies a GPU by itself.
MOST_TOKENS = {"cpu": 256}
MOST_TOKENS_ELSEWHERE = 4096
# Tokens of all domains together, which bound the activations of a stacked batch.
MOST_TOKENS_TOGETHER = 32768
# Float32 logits of a stacked batch beyond which a plain head gives those of one domain at a time.
MOST_LOGITS_BYTES = {"cpu": 64 << 20}
MOST_LOGITS_BYTES_ELSEWHERE = 4 << 30


def shifts_labels(model: Any) -> bool:
    """Whether the model's own loss predicts token i + 1 from the tokens up to i.

    `model.loss_type`, which Trainer asks, is None for some causal models (GPT-2); the function
    that they compute is this one.
    """
    is_causal = getattr(model, "loss_function", None) is ForCausalLMLoss
    return is_causal and not getattr(model.config, "is_encoder_decoder", False)


def num_targets(
    batches: Iterable[Mapping[str, Batch]], device: torch.device, *, is_shifted: bool
) -> dict[str, Tensor]:
    """{domain: the number of tokens that its loss is a mean over}, at least 1.

    Args:
        batches: {domain: batch}, the micro-batches of one optimizer step.
        device: of the result.
        is_shifted: the model shifts the labels, so the first of a row is not predicted.
    """
    sums: dict[str, Tensor] = {}
    for micro_batch in batches:
        for name, batch in checked_batch(micro_batch).items():
            if "labels" not in batch:
                continue
            labels = batch["labels"][..., 1:] if is_shifted else batch["labels"]
            # A collator that packs several texts into a row shifts the labels itself.
            targets = batch.get("shift_labels", labels).ne(IGNORED)
            # A domain whose tokens are all masked has loss zero, not 0/0.
            sums[name] = sums.get(name, 0) + targets.sum().clamp(min=1).to(device)
    return sums


def obstacle_to_stacking(inputs: Mapping[str, Batch]) -> str | None:
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


def gains_by_stacking(model: Any, inputs: Mapping[str, Batch], device_type: str) -> bool:
    """Whether one pass is known to give the same rows, and so few tokens make it the faster way."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    tokens = [batch["input_ids"].numel() for batch in inputs.values()]
    most = MOST_TOKENS.get(device_type, MOST_TOKENS_ELSEWHERE)
    is_small = max(tokens) <= most and sum(tokens) <= MOST_TOKENS_TOGETHER
    return model_type in STACKABLE and is_small


def stacked_losses(
    model: Any,
    unwrapped: Any,
    batches: Mapping[str, Batch],
    num_targets: Mapping[str, Any] | None,
) -> Tensor:
    """[D] mean losses of the model's own kind, one for each domain, from one forward pass.

    Args:
        model: maps inputs to logits.
        unwrapped: the same model without wrappers.
        batches: {domain: batch} to which there is no `obstacle_to_stacking`.
        num_targets: {domain: targets in the optimizer step}; None: those of these batches.
    """
    sizes = {name: len(batch["input_ids"]) for name, batch in batches.items()}
    keys = next(iter(batches.values()))
    inputs = {key: torch.cat([batch[key] for batch in batches.values()]) for key in keys}
    labels = inputs.pop("labels")
    most = MOST_LOGITS_BYTES.get(labels.device.type, MOST_LOGITS_BYTES_ELSEWHERE)
    has_many_logits = 4 * labels.numel() * unwrapped.config.vocab_size > most
    if has_many_logits and unwrapped.config.model_type in PLAIN_HEADS:
        head = unwrapped.get_output_embeddings()
        hidden = unwrapped.base_model(**inputs, use_cache=False).last_hidden_state
        return linear_domain_losses(
            hidden, head.weight, labels, sizes, bias_V=head.bias, num_targets=num_targets
        )
    logits = model(**inputs, use_cache=False).logits
    return domain_losses(logits, labels, sizes, num_targets=num_targets)
