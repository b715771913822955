"""What cannot fit is refused before anything is made or written."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from doge_fast.flat_buffer import FlatBuffer
from doge_fast.pipeline import domains, failures, memory
from doge_fast.pipeline import model as models
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.rehearsal import rehearse

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have so many bytes free."""
    return lambda num_bytes: monkeypatch.setattr(memory, "free_bytes", lambda _: num_bytes)


@pytest.mark.parametrize("run", [learn_weights, rehearse])
def test_a_run_that_cannot_fit_is_refused_before_its_model_is_made(proxy, free, monkeypatch, run):
    free(1000)
    monkeypatch.setattr(models, "_with_loss", None)
    config = proxy()
    with pytest.raises(
        ValueError, match=r"needs at least .*parameters .*1\.00kB of cpu memory are"
    ):
        run(config)
    assert not config.out.exists()


def test_stored_gradients_count_too(proxy, free):
    """The model fits, and its rows do not."""
    config = proxy(target=("universal",))
    plan = rehearse(config).split()
    num_rows = 4
    size = int(plan[plan.index("parameters") - 1].replace(",", ""))
    assert sum(memory.needed(size).values()) == 16 * size
    assert sum(memory.needed(size, num_rows).values()) == (16 + 4 * num_rows) * size
    # Two blocks of each row, and 8 bytes a token.
    step = config.sequences_per_domain * num_rows * config.corpus.block_size * 8
    enough = (16 + 4 * num_rows) * size + step
    free(enough)
    learn_weights(config)
    free(enough - 1)
    with pytest.raises(ValueError, match=r"gradients of 4 rows .*fewer domains"):
        learn_weights(replace(config, out=config.out / "other"))


@pytest.mark.parametrize(
    ("name", "size"), [("proxy", "sequences_per_domain"), ("base", "batch_size")]
)
def test_a_step_that_cannot_fit_is_refused_before_the_corpus_is_read(
    stage, name, size, monkeypatch
):
    call, make = stage(name)
    config = make(**{size: 10**12})
    monkeypatch.setattr(domains, "load_corpus", None)
    with pytest.raises(ValueError, match=r"tokens of a step .* memory are free"):
        call(config)
    assert not config.out.exists()


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda _: 100)
    parts = {"parameters": 60}
    memory.refuse_what_cannot_fit(parts, CPU, advice="")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes on this machine need at least 120"):
        memory.refuse_what_cannot_fit(parts, CPU, advice="")
    monkeypatch.setattr(memory, "free_bytes", lambda _: 120)
    memory.refuse_what_cannot_fit(parts, CPU, advice="")


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("12345\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "none"), str(tmp_path / "absent")))
    assert memory.free_bytes(CPU) > 10**6
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "max"),))
    assert memory.free_bytes(CPU) == 12345


def test_an_allocation_that_fails_says_what_needs_less():
    buffer = FlatBuffer(10**12)
    weight = torch.nn.Parameter(torch.zeros(10**5))
    with pytest.raises(RuntimeError, match="memory") as error:
        buffer.receive(0, weight, torch.zeros(10**5))
    (note,) = error.value.__notes__
    assert "the gradients of 1000000000000 domains" in note
    assert "buffer_dtype=torch.bfloat16" in note
    assert failures.ending_of(error.value).code == failures.WORLD
