"""Models for proxy and base: the paper's family, or any other causal language model.

A size of the family is a GPT-2 of transformers, so `AutoModelForCausalLM` opens the saved models.
"""

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from doge_fast.pipeline import hub, named
from doge_fast.pipeline.config import ModelConfig
from doge_fast.pipeline.failures import FileFailure, UserError, one_line, reading
from doge_fast.pipeline.sizes import SIZES, Size
from doge_fast.pipeline.tokenizer import end_of_text_id, text_vocabulary_size, vocabulary_size
from doge_fast.pipeline.wording import first_few

# Matrix products are fastest with a multiple of 64 rows; 50257 becomes the paper's 50304.
VOCAB_MULTIPLE = 64
# Tokens in the test of whether a model is causal.
_CHECKED_TOKENS = 8


def build_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    block_size: int,
) -> PreTrainedModel:
    """The causal language model that `config` describes, for this tokenizer and block size.

    Fresh weights are drawn from torch's global generator: seed it first. Dropout is zero in the
    family; the vocabulary is the tokenizer's, padded to a multiple of 64.

    Args:
        config: a size of the family, or a folder or Hub id of any causal language model.
        tokenizer: defines the vocabulary and the end-of-text token.
        block_size: tokens in a training example; the model needs as many positions.

    Returns:
        The model in float32, also a pretrained one.

    Raises:
        UserError: the name is no size, folder or Hub id; a pretrained model has too small a
            vocabulary; the model has fewer positions than a block has tokens; it is not causal.
        FileFailure: transformers cannot build or save the model; the message is its own.

    Source: DoGE, appendix model-archs.
    """
    architecture = check_model(config, block_size=block_size)
    if config.pretrained:
        known, needed = architecture.get_text_config().vocab_size, text_vocabulary_size(tokenizer)
        if known < needed:
            raise UserError(
                f"{config.model} knows {known} tokens and the corpus's tokenizer has {needed}. "
                "Continue pretraining with the model's own tokenizer: "
                f"tokenizer={config.model!r} (--tokenizer {shlex.quote(config.model)})."
            )
    else:
        # A configuration may require a padding token; give it an id that no text contains.
        has_padding = getattr(architecture, "pad_token_id", None) is not None
        num_tokens = vocabulary_size(tokenizer) + has_padding
        architecture.vocab_size = -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if has_padding:
            architecture.pad_token_id = architecture.vocab_size - 1
        architecture.bos_token_id = architecture.eos_token_id = end_of_text_id(tokenizer)
    if config.pretrained:
        model = open_model(config.model)
    else:
        with reading(config.model):
            made = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
        model = _with_loss(made)
    if config.model not in SIZES:
        with reading(config.model):
            _check_saved(model)
        _check_causal(config.model, model, block_size)
    return model


def check_model(config: ModelConfig, *, block_size: int) -> Any:
    """The transformers configuration for `config`, checked as far as possible without a tokenizer.

    For a fresh model it is the text part alone, in float32, without settings of extra outputs and
    quantization.
    """
    if config.pretrained and config.model in SIZES:
        raise UserError(
            "pretrained=True (--pretrained) needs a folder or Hub id to load weights from; got the "
            f"size {config.model!r}, which has none. Leave it out to train from scratch."
        )
    if config.model in SIZES:
        architecture: Any = _family(SIZES[config.model], block_size)
    else:
        architecture = load_architecture(config.model)
    if not config.pretrained:
        architecture = architecture.get_text_config()
        architecture.dtype = torch.float32
        architecture.return_dict = True
        # Blocks hold no padding, and the embedding of a padding token never learns.
        try:
            architecture.pad_token_id = None
        except StrictDataclassError:
            # The configuration rejects None, and its default id may lie outside the vocabulary.
            architecture.pad_token_id = architecture.vocab_size - 1
        architecture.output_attentions = architecture.output_hidden_states = False
        _leave_out_balance(architecture)
        if hasattr(architecture, "quantization_config"):
            del architecture.quantization_config
    text = architecture.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < block_size:
        raise UserError(
            f"{config.model} has {positions} positions, fewer than the {block_size} tokens of a "
            f"block. Pass block_size={positions} (--block-size {positions}) or less."
        )
    return architecture


def _check_saved(model: PreTrainedModel) -> None:
    """Save and reopen the configurations: an error here would break the first checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        AutoConfig.from_pretrained(folder)


def open_model(name: str | Path) -> PreTrainedModel:
    """Load a pretrained causal language model from a folder or Hub id, in float32.

    Raises:
        FileFailure: it does not open, or its files lack some of the weights.
    """
    with reading(name), without_bars():
        opened: Any = hub.from_pretrained(
            AutoModelForCausalLM.from_pretrained,
            str(name),
            dtype="float32",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, told = opened
    # transformers would initialise these at random and only warn.
    lost = sorted(told["missing_keys"]) + sorted(key for key, *_ in told["mismatched_keys"])
    if lost:
        raise FileFailure(
            f"{name} lacks weights of its model, or has them in another shape: "
            f"{first_few(lost, 3)}. Name another model, or make it anew."
        )
    _leave_out_balance(model.config)
    return _with_loss(model)


def _leave_out_balance(architecture: Any) -> None:
    """Keep the load-balancing loss of a mixture of experts out of the domain losses."""
    if getattr(architecture, "output_router_logits", False):
        architecture.output_router_logits = False


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which it shows for each file of weights."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _with_loss(model: Any) -> PreTrainedModel:
    # Some causal models (GPT-2) leave loss_type None; they compute this loss and warn.
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"
    return cast(PreTrainedModel, model)


def _family(size: Size, block_size: int) -> GPT2Config:
    return GPT2Config(
        n_positions=block_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.embed_dim,
        # GPT-2's activation in one kernel, without seven intermediate tensors of hidden width.
        activation_function="gelu_pytorch_tanh",
        # No dropout: one epoch or less needs no regularisation, and W is about the loss itself.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def load_architecture(name: str) -> Any:
    """Load a transformers configuration from a folder, a config.json or the Hub.

    Raises:
        UserError: there is none, or it does not open.
    """
    is_here = any(file.is_file() for file in (Path(name), Path(name, "config.json")))
    try:
        return hub.from_pretrained(AutoConfig.from_pretrained, name)
    except Exception as error:
        # Any exception: its cause lies in the file.
        reason, kind = one_line(error), FileFailure if is_here else UserError
        near = "" if is_here else named.nearest(name, SIZES)
        raise kind(
            f"model must be a size of the family ({', '.join(SIZES)}), or a folder or Hub id whose "
            f"config.json AutoConfig opens; got {name!r} ({reason}). {near}".rstrip()
        ) from error


def _check_causal(name: str, model: PreTrainedModel, block_size: int) -> None:
    """Raise UserError if logits depend on later tokens, for then the model sees its labels.

    `AutoModelForCausalLM` also opens bidirectional models, such as BERT with a decoder's head.
    """
    length = max(2, min(_CHECKED_TOKENS, block_size))
    # Start at id 8: low ids are often padding, and some models derive positions from padding.
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    num_tokens = len(embedding.weight)
    tokens_1L = torch.arange(8, 8 + length)[None] % num_tokens
    other_1L = tokens_1L.clone()
    other_1L[0, -1] = (other_1L[0, -1] + 1) % num_tokens
    is_training, caches = model.training, getattr(model.config, "use_cache", False)
    model.train(False)
    # No cache: only generation needs it, and some models with few layers cannot create one.
    model.config.use_cache = False
    with reading(name), torch.no_grad():
        logits_LV, changed_LV = (model(input_ids=each).logits[0] for each in (tokens_1L, other_1L))
    model.config.use_cache = caches
    model.train(is_training)
    leak = (logits_LV - changed_LV)[:-1].abs().max()
    # A causal model's logits differ by rounding at most: the last token may change the batches of
    # experts. If a position sees the last of eight tokens, they differ far more.
    if leak > 64 * torch.finfo(logits_LV.dtype).eps * logits_LV.abs().max():
        raise UserError(
            f"Training needs a causal language model; in {name} (model type "
            f"{model.config.model_type}) a later token changes what is predicted at an earlier "
            "one, so it would see what it is to predict. Name a causal one, or set is_decoder to "
            "true in its config.json where the type has that."
        )
