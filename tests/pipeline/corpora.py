"""Documents that name their domain, written in the layouts a corpus comes in."""

import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import Corpus, load_corpus

_TOKENIZERS = tempfile.TemporaryDirectory(prefix="doge-fast-tokenizers-")
WORDS = ["the", "of", "a", "kernel", "gradient", "domain", "weight", "moves", "towards", "what"]


def text_of(name: str, index: int) -> str:
    """A document of its own, thirty to sixty words, each with a number that tells blocks apart."""
    draw = np.random.default_rng([index, *name.encode()])
    words = [f"{word} {draw.integers(100)}" for word in draw.choice(WORDS, draw.integers(30, 60))]
    return f"{name} {index}: " + " ".join(words)


def texts(name: str, count: int = 40) -> list[str]:
    return [text_of(name, index) for index in range(count)]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows in the form that the file's name says; JSON lines, if it says none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        case ".arrow":
            table = pa.Table.from_pylist(list(rows))
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=7)
        case ".json":
            path.write_text(json.dumps(list(rows), indent=1))
        case ".zst":
            path.write_bytes(pa.compress(lines, "zstd", asbytes=True))
        case ".gz":
            path.write_bytes(gzip.compress(lines))
        case _:
            path.write_bytes(lines)
    return path


def write_text(path: Path, text: str) -> Path:
    """A text file, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = text.encode()
    packed = {
        ".gz": lambda: gzip.compress(plain),
        ".zst": lambda: pa.compress(plain, "zstd", asbytes=True),
    }
    path.write_bytes(packed.get(path.suffix, lambda: plain)())
    return path


def write_jsonl(path: Path, documents: Iterable[str]) -> Path:
    return write_rows(path, [{"text": text} for text in documents])


def write_parquet(path: Path, **columns: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
    return path


def tokens(blocks: datasets.Dataset) -> list[int]:
    return list(np.asarray(blocks[:]["input_ids"]).reshape(-1))


def documents(corpus: Corpus, name: str, split: str) -> list[str]:
    """The texts between ends of text, the last of them perhaps cut."""
    blocks = getattr(corpus, split)[name]
    end = corpus.tokenizer.eos_token_id
    found: list[list[int]] = [[]]
    for token in tokens(blocks):
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    return [corpus.tokenizer.decode(ids) for ids in found if ids]


def saved_tokenizer(corpus: Corpus) -> str:
    """A folder with the tokenizer of a corpus, which goes with the process."""
    folder = Path(_TOKENIZERS.name) / corpus.tokenizer_sha256
    corpus.tokenizer.save_pretrained(folder)
    return str(folder)


def check_refused(config: CorpusConfig, message: str, **options: Any) -> None:
    """One sentence, and not a file written but locks."""
    cached = Path(config.cache_dir or "")

    def written() -> list[Path]:
        files = filter(Path.is_file, cached.rglob("*"))
        return sorted(file for file in files if file.suffix != ".lock")

    before = written()
    with pytest.raises(ValueError, match=message) as refusal:
        load_corpus(config, **options)
    assert "\n" not in str(refusal.value)
    assert written() == before


def answer_as_hub(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path) -> list[str]:
    """Answers a Hub id with a folder, through the very calls that would ask the Hub.

    Returns:
        The text of every row that is read of it from here on, as it is read.
    """
    read: list[str] = []

    def watch(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["text"])
        return row

    for function in ("load_dataset_builder", "get_dataset_config_names"):
        real = getattr(datasets, function)

        def answer(path: str, *args: Any, real: Any = real, **options: Any) -> Any:
            if path != name:
                return real(path, *args, **options)
            found = real(str(folder), *args, **options)
            if isinstance(found, datasets.DatasetBuilder):
                splits = found.as_streaming_dataset()
                watched = {split: rows.map(watch) for split, rows in splits.items()}
                monkeypatch.setattr(found, "as_streaming_dataset", lambda: watched)
            return found

        monkeypatch.setattr(datasets, function, answer)
    return read


def name_configurations(folder: Path, names: Iterable[str]) -> None:
    """Each folder of these names is a configuration of the data set."""
    lines = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in names)
    (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")
