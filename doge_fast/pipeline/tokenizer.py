"""The tokenizer of a corpus: opened or trained, and made to give the same tokens every time."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import datasets
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from doge_fast.pipeline import cache, hub, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.failures import FileFailure, UserError, one_line
from doge_fast.pipeline.sources import Part

_log = logging.getLogger("doge_fast")

END_OF_TEXT = "<|endoftext|>"

_TOKENIZER_FORMAT = 3
_TOKENIZER_CHARS_PER_DOMAIN = 1_000_000

# {part: the domains that are read from it}.
Groups = Mapping[Part, Sequence[str]]


def open_tokenizer(config: CorpusConfig, parts: Groups) -> PreTrainedTokenizerFast:
    """The tokenizer that `config` names, or one trained on these domains.

    Raises:
        UserError: it does not open, is not a fast tokenizer, or has no end-of-text token.
        FileFailure: it is a path, and does not open.
    """
    name = config.tokenizer
    if name == "train":
        return _trained(config, parts)
    try:
        tokenizer = hub.from_pretrained(AutoTokenizer.from_pretrained, name)
    except Exception as error:
        # At an existing path, its files are the cause.
        kind = FileFailure if Path(name).exists() else UserError
        raise kind(f"The tokenizer {name} does not open: {one_line(error)}.") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"Packing needs a fast tokenizer, a tokenizer.json; {name} has none.")
    end_of_text_id(tokenizer)
    return tokenizer


def end_of_text_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token between documents: the tokenizer's eos_token, or <|endoftext|>."""
    found = tokenizer.eos_token_id
    if found is None and (found := tokenizer.get_vocab().get(END_OF_TEXT)) is None:
        raise UserError(
            f"Documents are joined by an end-of-text token; the tokenizer "
            f"{tokenizer.name_or_path} has neither an eos_token nor {END_OF_TEXT}."
        )
    return int(found)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id plus one, since ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def text_vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """The largest id of a token of text or of its end, plus one.

    Text never becomes a special token that was added to the tokenizer, such as padding, and a model
    may lack those.
    """
    plain = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values()
    added = [id for id, token in tokenizer.added_tokens_decoder.items() if not token.special]
    return max(*plain, *added, end_of_text_id(tokenizer)) + 1


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of the tokenizer's serialisation, whatever folder it is saved in."""
    return hashlib.sha256(packing_tokenizer(tokenizer).to_str().encode()).hexdigest()


def packing_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A deterministic copy without padding and truncation, which reads special tokens as text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    # Else a document that mentions <|endoftext|> would end there.
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None):
        # BPE dropout skips merges at random, to train translation models.
        backend.model.dropout = None
    return backend


def unknown_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of the tokens for unknown characters."""
    name = getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
    found = [tokenizer.unk_token_id, tokenizer.get_vocab().get(name) if name else None]
    return {int(id) for id in found if id is not None}


def lost_characters(text: str, encoding: Encoding, unknown: set[int]) -> tuple[int, int]:
    """(characters that only an unknown token covers, all characters), without white space."""
    is_kept = bytearray(len(text))
    for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if id not in unknown:
            is_kept[start:end] = b"\1" * (end - start)
    is_lost = [not kept for kept, char in zip(is_kept, text, strict=True) if not char.isspace()]
    return sum(is_lost), len(is_lost)


def _trained(config: CorpusConfig, parts: Groups) -> PreTrainedTokenizerFast:
    """A byte-level BPE of an equal share of every domain's text, trained once."""

    def train() -> Iterator[Mapping[str, str]]:
        # Sorted by name, targets included, so that the tokenizer does not depend on the target.
        texts = list(_tokenizer_texts(sorted(parts.items(), key=lambda each: min(each[1]))))
        size = config.vocab_size
        _log.info("Training a tokenizer of %d entries on %d documents.", size, len(texts))
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        yield {"tokenizer": backend.to_str()}

    prints = {name: part.fingerprint for part, names in parts.items() for name in names}
    key = cache.digest([_TOKENIZER_FORMAT, prints, config.text_column, config.vocab_size])
    trained = cache.cached(config, key, train, tokenizer=datasets.Value("string"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(trained[0]["tokenizer"]),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _tokenizer_texts(parts: Iterable[tuple[Part, Sequence[str]]]) -> Iterator[str]:
    """The same number of characters from every domain that has them."""
    for part, names in parts:
        left = dict.fromkeys(names, _TOKENIZER_CHARS_PER_DOMAIN)
        for name, text in progress.over(part.documents(), "reading for the tokenizer"):
            if left.get(name, 0) > 0:
                yield text[: left[name]]
                left[name] -= len(text)
                if all(chars <= 0 for chars in left.values()):
                    break
