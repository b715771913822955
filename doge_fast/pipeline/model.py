"""The paper's model family, proxy and base alike, and any other causal language model.

A size of the family is a GPT-2 of transformers, so that what a stage saves opens with
`AutoModelForCausalLM` and everything built on it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from doge_fast.pipeline.config import ModelConfig
from doge_fast.pipeline.failures import FileFailure, one_line, reading
from doge_fast.pipeline.sizes import SIZES

# Matrix products want a multiple of 64 rows; 50257 becomes the paper's 50304.
VOCAB_MULTIPLE = 64
# Enough to tell whether a model looks ahead.
_CHECKED_TOKENS = 8


def build_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block_size: int,
    on_size: Callable[[int], None] | None = None,
) -> PreTrainedModel:
    """The causal language model that `config` describes, for this tokenizer and block size.

    Fresh weights are drawn from torch's global generator: seed it first. Dropout is zero in the
    family; the vocabulary is the tokenizer's, padded to a multiple of 64.

    Args:
        config: a size of the family, or a folder or Hub id of any causal language model.
        tokenizer: gives the vocabulary and the end-of-text token.
        block_size: tokens in a training example; positions that the model needs.
        on_size: called with the number of parameters before there are any; may refuse.

    Returns:
        The model, in float32 (a pretrained one too).

    Raises:
        ValueError: the name is no size, folder or Hub id; heads do not divide the width; a
            pretrained model has another vocabulary or is asked to change shape; the model has
            fewer positions than a block has tokens; it is not causal.

    Source: DoGE, appendix model-archs.
    """
    is_family = config.model in SIZES
    architecture: Any = (
        _family(config.model, tokenizer, block_size)
        if is_family
        else load_architecture(config.model)
    )
    if config.pretrained:
        _check_pretrained(config, architecture, tokenizer)
    else:
        architecture.vocab_size = padded_vocab_size(tokenizer)
        for attribute, value in _asked_shape(config).items():
            setattr(architecture, attribute, value)
        num_heads, embed_dim = architecture.num_attention_heads, architecture.hidden_size
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                "The embedding width must be a multiple of the number of heads; got "
                f"{embed_dim} and {num_heads}. Change embed_dim (--embed-dim) or num_heads "
                "(--num-heads)."
            )
    positions = getattr(architecture, "max_position_embeddings", None)
    if positions is not None and positions < block_size:
        raise ValueError(
            f"{config.model} has {positions} positions, fewer than the {block_size} tokens of a "
            f"block. Pass block_size={positions} (--block-size {positions}) or less."
        )
    if on_size is not None and (size := _num_parameters(architecture)) is not None:
        on_size(size)
    if config.pretrained:
        model = open_model(config.model)
    else:
        with reading(config.model, "Mend its config.json, or name another model."):
            made = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
        model = _with_loss(made)
    if not is_family:
        _check_causal(config.model, model, block_size)
    return model


def _num_parameters(architecture: Any) -> int | None:
    """Those that train, without memory for any; None where the model cannot be built so."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
        except Exception:
            # Whoever builds it with memory says what is wrong with it.
            return None
    return int(model.num_parameters(only_trainable=True))


def open_model(name: str | Path) -> PreTrainedModel:
    """The causal language model of a folder or Hub id, with its weights, in float32.

    Raises:
        FileFailure: it does not open, or its files lack some of the weights.
    """
    with reading(name, "Name another model, or make it anew."), _quiet():
        opened: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype="float32", output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, told = opened
    # Else drawn anew, and nobody would know.
    lost = sorted(told["missing_keys"]) + sorted(key for key, *_ in told["mismatched_keys"])
    if lost:
        raise FileFailure(
            f"{name} lacks weights of its model, or has them in another shape: "
            f"{', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}. Name another model, or make "
            "it anew."
        )
    return _with_loss(model)


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers shows no bar for each file of weights: what takes a while has one of ours."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers tells of weights in a table; one sentence of ours does."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with without_bars():
            yield
    finally:
        transformers_logging.set_verbosity(before)


def _with_loss(model: Any) -> PreTrainedModel:
    # Some causal models (GPT-2) leave it None and compute this loss, with a warning.
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"
    return cast(PreTrainedModel, model)


def padded_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's entries, up to the next multiple of 64."""
    return -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _family(name: str, tokenizer: PreTrainedTokenizerBase, block_size: int) -> GPT2Config:
    size = SIZES[name]
    return GPT2Config(
        n_positions=block_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.embed_dim,
        # GPT-2's own, in one kernel: no seven intermediate tensors of the hidden width.
        activation_function="gelu_pytorch_tanh",
        # One epoch or less: nothing to regularise, and W is about the loss itself.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def load_architecture(name: str) -> Any:
    """The configuration of transformers in a folder, in its config.json or on the Hub.

    Raises:
        ValueError: there is none.
    """
    is_missing = name.startswith((".", "/", "~")) and not Path(name).exists()
    try:
        if is_missing:
            raise OSError(f"{name} is not a folder or a file")
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        # Whatever it stumbles over is in the file.
        reason, file = one_line(error), Path(name)
        is_there = file.is_file() or (file / "config.json").exists()
        kind = FileFailure if is_there else ValueError
        raise kind(
            f"model must be a size of the family ({', '.join(SIZES)}), or a folder or Hub id whose "
            f"config.json AutoConfig opens; got {name!r} ({reason})."
        ) from error


def _asked_shape(config: ModelConfig) -> dict[str, int]:
    asked = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _check_pretrained(
    config: ModelConfig, architecture: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    if config.model in SIZES:
        raise ValueError(
            "pretrained=True (--pretrained) needs a folder or Hub id to load weights from; got the "
            f"size {config.model!r}, which has none. Leave it out to train from scratch."
        )
    if Path(config.model).is_file():
        raise ValueError(
            "pretrained=True (--pretrained) needs the folder that holds the weights too; got the "
            f"file {config.model!r}. Name the folder, or leave it out."
        )
    if shape := _asked_shape(config):
        raise ValueError(
            f"A pretrained model keeps its shape; got pretrained=True (--pretrained) with {shape}. "
            "Leave out num_layers, embed_dim and num_heads (--num-layers, ...), or train from "
            "scratch."
        )
    if architecture.vocab_size < len(tokenizer):
        raise ValueError(
            f"{config.model} knows {architecture.vocab_size} tokens and the corpus's tokenizer "
            f"has {len(tokenizer)}. Continue pretraining with the model's own tokenizer: "
            f"tokenizer={config.model!r} (--tokenizer {config.model})."
        )


def _check_causal(name: str, model: PreTrainedModel, block_size: int) -> None:
    """Logits of a position follow from the tokens up to it; else the loss would leak its labels.

    `AutoModelForCausalLM` opens bidirectional models too, BERT's with a decoder's head.
    """
    length = max(2, min(_CHECKED_TOKENS, block_size))
    # Low numbers are often padding, which some models count positions by.
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    num_tokens = len(embedding.weight)
    tokens_1L = torch.arange(8, 8 + length)[None] % num_tokens
    other_1L = tokens_1L.clone()
    other_1L[0, -1] = (other_1L[0, -1] + 1) % num_tokens
    is_training, caches = model.training, getattr(model.config, "use_cache", False)
    model.train(False)
    # A cache is for generating, and some of few layers cannot make theirs.
    model.config.use_cache = False
    with torch.no_grad():
        logits_LV, changed_LV = (model(input_ids=each).logits[0] for each in (tokens_1L, other_1L))
    model.config.use_cache = caches
    model.train(is_training)
    leak = (logits_LV - changed_LV)[:-1].abs().max()
    # What is the same arithmetic on the same numbers differs by rounding at most: experts get
    # other batches with the last token. One of eight tokens weighs far more than that.
    if leak > 64 * torch.finfo(logits_LV.dtype).eps * logits_LV.abs().max():
        raise ValueError(
            f"Training needs a causal language model; in {name} (model type "
            f"{model.config.model_type}) a later token changes what is predicted at an earlier "
            "one, so it would see what it is to predict. Name a causal one, or set is_decoder to "
            "true in its config.json where the type has that."
        )
