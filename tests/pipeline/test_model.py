"""The family has the sizes that its names say; any other causal model opens or is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from doge_fast import cli
from doge_fast.pipeline import stage
from doge_fast.pipeline.config import BaseConfig, CorpusConfig, ModelConfig
from doge_fast.pipeline.model import build_model

PAPER_VOCAB = 50257


def tokenizer_of(num_entries: int) -> PreTrainedTokenizerFast:
    entries = {f"w{i}": i for i in range(num_entries - 1)} | {"<|endoftext|>": num_entries - 1}
    words = Tokenizer(models.WordLevel(entries, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")


def built(
    model: str | Path, num_entries: int = 100, block_size: int = 16, **settings: Any
) -> PreTrainedModel:
    """For a tokenizer of so many entries."""
    config = ModelConfig(model=str(model), **settings)
    return build_model(config, tokenizer_of(num_entries), block_size=block_size)


@pytest.mark.parametrize("name", ["82M", "684M"])
def test_a_size_of_the_paper_has_the_parameters_of_its_name(name):
    with torch.device("meta"):
        model = built(name, PAPER_VOCAB, block_size=512)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert model.config.vocab_size == 50304
    # The names round, the 82M's down: 12 x 6 x 768^2 + 50304 x 768 = 81.1M without the rest.
    assert millions == pytest.approx(float(name.removesuffix("M")), rel=0.01)


def test_what_nobody_says_comes_with_the_size(tmp_path, monkeypatch):
    def told(model: str, *words: str) -> list[float | str]:
        config = cli.parse(["proxy", "--out", str(tmp_path), "--model", model, *words])
        rates = config.training.learning_rate, config.training.min_learning_rate
        return [config.corpus.block_size, config.sequences_per_domain, *rates]

    # Source: DoGE, section universal-exp and appendix model-archs.
    assert told("82M") == [512, 18, 5e-4, 1e-4]
    assert told("684M") == [512, 18, 1.5e-4, 5e-5]
    assert told("tiny") == told("owner/name") == [128, 4, 5e-4, 1e-4]
    words = ["--block-size", "128", "--sequences-per-domain", "4", "--learning-rate", "3e-4"]
    assert told("684M", *words) == [128, 4, 3e-4, 5e-5]
    # What a record repeats is what was said.
    file = tmp_path / "fields.yaml"
    file.write_text("corpus: {block_size: 64}\n")
    assert told("82M", "--config", str(file)) == [64, 18, 5e-4, 1e-4]
    corpus = CorpusConfig()
    large, small = (
        BaseConfig(tmp_path, corpus, ModelConfig(model=name)) for name in ("210M", "mini")
    )
    sizes = [(each.corpus.block_size, each.batch_size) for each in (large, small)]
    assert sizes == [(512, 128), (128, 28)]
    dtypes = []
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(stage, "device_of", lambda name, kind=kind: torch.device(kind))
        dtypes += [stage.resolved(each).training.dtype for each in (large, small)]
    assert dtypes == ["float32", "float32", "bfloat16", "float32"]
    plain = replace(large, training=replace(large.training, dtype="float32"))
    assert stage.resolved(plain) == plain


def test_a_padding_token_that_must_be_one_is_a_number_that_no_text_has(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    config = CONFIG_MAPPING["modernbert-decoder"](intermediate_size=48, **shape)
    config.save_pretrained(tmp_path)
    # 128 entries fill two blocks of 64.
    model = built(tmp_path, 128)
    assert len(model.get_input_embeddings().weight) == 192
    tokens_BL = torch.arange(128).view(8, 16)
    model(input_ids=tokens_BL, labels=tokens_BL).loss.backward()
    gradient_VE = model.get_input_embeddings().weight.grad
    # Every token of a text learns.
    assert gradient_VE[:128].abs().sum(1).min() > 0


def test_a_special_token_that_no_text_becomes_may_lie_outside_of_a_pretrained_model(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path), pretrained=True)
    tokenizer = tokenizer_of(100)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert max(tokenizer.get_vocab().values()) == 100
    assert build_model(config, tokenizer, block_size=16).config.vocab_size == 100
    tokenizer.add_tokens(["word"])
    with pytest.raises(ValueError, match="knows 100 tokens"):
        build_model(config, tokenizer, block_size=16)


def test_there_is_no_dropout_and_one_embedding():
    model = built(ModelConfig().model).train()
    tokens_BL = torch.arange(32).view(2, 16)
    assert torch.equal(model(tokens_BL).logits, model(tokens_BL).logits)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def folder_of(tmp_path: Path, **changes: object) -> str:
    """A config.json as the Hub has them."""
    told: dict[str, object] = {"model_type": "qwen2", "torch_dtype": "bfloat16"}
    told |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    told |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}
    told |= {"max_position_embeddings": 64}
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**told, **changes}))
    return str(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A model with its weights, in bfloat16."""
    name = folder_of(tmp_path / "saved", vocab_size=192)
    config = AutoConfig.from_pretrained(name)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(name)
    return name


@pytest.mark.parametrize("pretrained", [False, True])
def test_what_balances_experts_is_no_loss_of_a_domain(tmp_path, pretrained):
    experts = {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 100.0}
    name = folder_of(tmp_path, model_type="mixtral", vocab_size=128, **experts)
    if pretrained:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).save_pretrained(name)
    model = built(name, 128, pretrained=pretrained)
    tokens_1L = torch.arange(16)[None]
    found = model(tokens_1L, labels=tokens_1L)
    expected = torch.nn.functional.cross_entropy(found.logits[0, :-1], tokens_1L[0, 1:])
    torch.testing.assert_close(found.loss, expected)


def test_pretraining_continues_from_the_saved_weights_in_float32(saved):
    model = built(saved, 192, pretrained=True)
    saved = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)


def test_a_fresh_model_is_of_the_corpus_and_in_float32_whatever_its_config_says(saved, tmp_path):
    # torch_dtype as the Hub has it, dtype as transformers writes it.
    for name in (folder_of(tmp_path / "hub"), saved):
        model = built(name)
        assert (model.config.model_type, model.config.vocab_size) == ("qwen2", 128)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        # What is saved opens as it was trained.
        model.save_pretrained(tmp_path / "own")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "own").dtype == torch.float32


@pytest.mark.parametrize(
    ("told", "word"),
    [
        ({"model_type": "vit"}, "Unrecognized configuration class"),
        ({"model_type": "t5", "d_model": 32}, "Unrecognized configuration class"),
        ({"layer_types": ["full_attention"] * 3}, "layer"),
        ({"hidden_act": "nothing"}, "nothing"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers.* expected int, got float"),
    ],
)
def test_what_cannot_be_built_is_refused_in_the_words_of_transformers(tmp_path, told, word):
    with pytest.raises(ValueError, match=word):
        built(folder_of(tmp_path, **told))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        # A micro model has 16.
        ("select", {"strategies": ("low17",)}, "low17 selects more parameters than the 16"),
        ("proxy", {"selection": ["head"]}, "selection names 'head'"),
        ("base", {"model": "bert"}, r"needs a causal .* \(model type bert\) a later token"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_likewise(stage, tmp_path, name, changes, word):
    if "selection" in changes:
        (tmp_path / "names.json").write_text(json.dumps(changes["selection"]))
        changes = {"selection": tmp_path / "names.json"}
    if "model" in changes:
        BERT.save_pretrained(tmp_path / "bert")
        changes = {"model": str(tmp_path / "bert")}
    call, make = stage(name)
    config = make(cache_dir=tmp_path / "cache", **changes)
    with pytest.raises(ValueError, match=word):
        call(config)
    assert not (tmp_path / "cache" / "blocks").exists()
    assert not config.out.exists()


def test_a_token_of_a_foreign_config_is_not_taken_for_padding(tmp_path):
    """Its embedding would never learn; a number past the vocabulary would not be a model."""
    for pad in (0, 5_000):
        name = folder_of(tmp_path, pad_token_id=pad, eos_token_id=4_000, bos_token_id=7_000)
        model = built(name)
        assert model.get_input_embeddings().padding_idx is None
        assert model.config.eos_token_id == model.config.bos_token_id == 99
        tokens_BL = torch.arange(16).view(1, 16)
        model(input_ids=tokens_BL, labels=tokens_BL).loss.backward()
        grads_VD = model.get_input_embeddings().weight.grad
        # The last one is predicted, and nothing after it.
        assert (grads_VD[:15] != 0).any(dim=1).all()


def test_what_a_foreign_config_returns_is_not_asked(tmp_path):
    name = folder_of(tmp_path, return_dict=False, output_hidden_states=True)
    model = built(name)
    assert model(torch.arange(16).view(1, 16)).hidden_states is None


def test_the_text_part_of_a_config_is_taken(tmp_path):
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    folder_of(tmp_path)
    told = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    model = built(tmp_path)
    assert model.get_input_embeddings().weight.shape == (128, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


BERT = BertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)


@pytest.mark.parametrize(
    "architecture",
    [
        # ALiBi: no positions in the embedding.
        BloomConfig(hidden_size=32, n_layer=2, n_head=2),
        BertConfig(**{**BERT.to_diff_dict(), "is_decoder": True}),
    ],
    ids=lambda architecture: str(architecture.model_type),
)
@pytest.mark.parametrize("block_size", [2, 16])
def test_a_model_that_does_not_is_left_as_it_was_drawn(tmp_path, architecture, block_size):
    architecture.save_pretrained(tmp_path)
    set_seed(0)
    model = built(tmp_path, block_size=block_size)
    drawn = torch.rand(1)
    set_seed(0)
    AutoModelForCausalLM.from_config(model.config)
    assert torch.equal(torch.rand(1), drawn)
    assert model.training
    assert model.config.use_cache
