"""Small models of transformers, and arguments of their trainers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 6,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return TrainingArguments(**(options | changes))


EVERY_STEP_LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}

VOCABULARY, LENGTH = 61, 10
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": GROUPED | {"attention_bias": True},
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "mistral": GROUPED | {"sliding_window": 8},
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma2": GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 8},
}


def tiny(kind: str, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **OPTIONS[kind], **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.double().train()
