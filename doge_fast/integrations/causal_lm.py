"""Causal language models of transformers: when one pass may serve all domains, and its losses."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from doge_fast import scale
from doge_fast.integrations.domain_data import Batch
from doge_fast.stacked.layers.batch import on_device
from doge_fast.stacked.losses import IGNORED, domain_losses, linear_domain_losses

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
# Tokens of all domains together where the device does not say how much memory it has.
MOST_TOKENS_TOGETHER = 32768
# Share of the device's memory that a stacked step may need by the formula; the rest is for what the
# formula does not know, and for holes between blocks.
MOST_OF_MEMORY = 0.9
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
    batches: Iterable[Mapping[str, Batch]],
    rows: Sequence[str],
    device: torch.device,
    *,
    is_shifted: bool,
) -> Tensor:
    """[R] the number of tokens that the loss of each row is a mean over; 0 without labels.

    Args:
        batches: {domain: batch}, the micro-batches of one optimizer step.
        rows: names of domains, in the order of the result.
        device: of the result.
        is_shifted: the model shifts the labels, so the first of a row is not predicted.
    """
    names, targets = [], []
    for micro_batch in batches:
        for name, batch in micro_batch.items():
            if "labels" not in batch:
                continue
            labels = batch["labels"][..., 1:] if is_shifted else batch["labels"]
            names.append(name)
            # A collator that packs several texts into a row shifts the labels itself.
            targets.append(batch.get("shift_labels", labels))
    if not names:
        return torch.zeros(len(rows), dtype=torch.int64, device=device)
    counts_C = torch.stack([part.ne(IGNORED).sum() for part in targets])
    is_its_RC = on_device([[row == name for name in names] for row in rows], counts_C.device)
    sums_R = torch.where(is_its_RC.bool(), counts_C, 0).sum(1)
    if device.type == "cuda" and sums_R.device.type == "cpu":
        # Pinned, or the copy would make the host wait for the device.
        sums_R = sums_R.pin_memory()
    return sums_R.to(device, non_blocking=True)


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


def gains_by_stacking(
    model: Any,
    inputs: Mapping[str, Batch],
    device: torch.device | str,
    *,
    is_mixed: bool = False,
) -> bool:
    """Whether one pass is known to give the same rows, to fit, and to be the faster way.

    Args:
        model: a causal language model of transformers.
        inputs: {domain: batch} to which there is no `unstackable_reason`.
        device: that the model trains on.
        is_mixed: products are of 16 bits, under autocast.
    """
    device = torch.device(device)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    tokens: list[int] = [batch["input_ids"].numel() for batch in inputs.values()]
    most = MOST_TOKENS.get(device.type, MOST_TOKENS_ELSEWHERE)
    if model_type not in STACKABLE or max(tokens) > most:
        return False
    capacity = memory_for_us(device)
    if capacity is None:
        return sum(tokens) <= MOST_TOKENS_TOGETHER
    needed = stacked_bytes(model, inputs, is_mixed=is_mixed)
    return needed <= MOST_OF_MEMORY * capacity


@functools.cache
def memory_for_us(device: torch.device) -> int | None:
    """Bytes of a GPU that are free or ours already; None where the device does not say.

    Asked once: a choice that follows from it must not change from step to step.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def stacked_bytes(model: Any, inputs: Mapping[str, Batch], *, is_mixed: bool = False) -> int:
    """Bytes of a stacked step at its peak: what has the model's size, and activations.

    Parameters, gradients and AdamW's two moments; a row for each domain; what the backward pass of
    all tokens needs; logits, of which a plain head has those of one domain. An upper bound for
    `STACKABLE`, as the tests hold it against what autograd saves.
    """
    num_params = sum(param.numel() for param in model.parameters())
    tokens = [batch["input_ids"].numel() for batch in inputs.values()]
    config, itemsize = model.config, 2 if is_mixed else next(model.parameters()).itemsize
    length = next(iter(inputs.values()))["input_ids"].shape[-1]
    layers = sum(tokens) * activation_bytes(model, itemsize, length)
    is_by_domain = config.model_type in PLAIN_HEADS and _has_many_logits(
        sum(tokens), config, "elsewhere"
    )
    num_logits = (max(tokens) if is_by_domain else sum(tokens)) * config.vocab_size
    state = sum(scale.training_bytes(num_params).values())
    rows = scale.rows_bytes(num_params, len(tokens), scale.FLOAT32)
    return int(layers + num_logits * scale.logit_bytes(itemsize) + state + rows)


def activation_bytes(model: Any, itemsize: int, length: int) -> int:
    """Bytes for each token that the layers below the head save for the backward pass.

    Args:
        model: of `STACKABLE`.
        itemsize: bytes of a number in products.
        length: of the sequences.
    """
    config = model.config
    width: int = config.hidden_size
    # GPT-2 has another name for it, and None for the usual size.
    inner = getattr(config, "n_inner" if hasattr(config, "n_inner") else "intermediate_size", None)
    layer = scale.layer_bytes(width, inner or 4 * width, itemsize)
    if config._attn_implementation == "eager":
        layer += 12 * config.num_attention_heads * length
    num_layers: int = config.num_hidden_layers
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return layer + 4 * width * (num_layers + 5)
    return num_layers * layer + 20 * width


def _has_many_logits(num_tokens: int, config: Any, device_type: str) -> bool:
    most = MOST_LOGITS_BYTES.get(device_type, MOST_LOGITS_BYTES_ELSEWHERE)
    return bool(4 * num_tokens * config.vocab_size > most)


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
        batches: {domain: batch} to which there is no `unstackable_reason`.
        num_targets: {domain: targets in the optimizer step}; None: those of these batches.
    """
    sizes = {name: len(batch["input_ids"]) for name, batch in batches.items()}
    keys = next(iter(batches.values()))
    inputs = {key: torch.cat([batch[key] for batch in batches.values()]) for key in keys}
    labels = inputs.pop("labels")
    has_many_logits = _has_many_logits(labels.numel(), unwrapped.config, labels.device.type)
    if has_many_logits and unwrapped.config.model_type in PLAIN_HEADS:
        head = unwrapped.get_output_embeddings()
        hidden = unwrapped.base_model(**inputs, use_cache=False).last_hidden_state
        return linear_domain_losses(
            hidden, head.weight, labels, sizes, bias_V=head.bias, num_targets=num_targets
        )
    logits = model(**inputs, use_cache=False).logits
    return domain_losses(logits, labels, sizes, num_targets=num_targets)
