"""Batches from named domains at weights that move: the same for any number of workers and ranks."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from doge_fast.mixture import DomainMixture
from doge_fast.mixture.counts import MixtureCounts, Phase

# A row is a number; its thousands are its domain.
SIZES = {"web": 60, "code": 25, "books": 7}
FIRST = {"web": 0, "code": 1000, "books": 2000}
START = {"web": 0.5, "code": 0.3, "books": 0.2}
THEN = {"web": 0.1, "code": 0.2, "books": 0.7}
SHARDED = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]


def sized(**changed) -> DomainMixture:
    domains = {name: range(FIRST[name], FIRST[name] + size) for name, size in SIZES.items()}
    return DomainMixture(domains, **{"weights": START, "batch_size": 12, "seed": 5, **changed})


def plain(mixture: DomainMixture, num_steps: int, first: int = 0) -> list[list[int]]:
    """The batches, read one after another without any loader."""
    steps = range(first, first + num_steps)
    return [mixture.__getitems__(mixture.draws(step)) for step in steps]


def by_sampler(mixture, rank: int, world: int, workers: int, **options) -> DataLoader:
    sampler = mixture.batches(rank, world)
    return DataLoader(mixture, batch_sampler=sampler, num_workers=workers, **options)


def united(loaders: list[DataLoader]) -> list[list[int]]:
    """Global batches: the ranks' shares, one after another."""
    return [torch.cat(parts).tolist() for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize(("world", "workers"), SHARDED)
def test_ranks_and_workers_see_the_batches_of_one_process(world, workers):
    mixtures = [sized(steps=7) for _ in range(world)]
    for mixture in mixtures:
        mixture.set_weights(THEN, from_step=4)
    loaders = [by_sampler(mixtures[rank], rank, world, workers) for rank in range(world)]
    expected = sized()
    expected.set_weights(THEN, from_step=4)
    assert united(loaders) == plain(expected, 7)


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, None), pytest.param(1, "spawn", marks=pytest.mark.exhaustive)],
)
def test_weights_change_at_the_named_step_for_any_number_of_workers(workers, context):
    mixture = sized(steps=14)
    seen = []
    loader = by_sampler(mixture, 0, 1, workers, multiprocessing_context=context)
    for step, batch in enumerate(loader):
        seen.append(batch.tolist())
        weights = {"web": 0.1 + 0.05 * step, "code": 0.2, "books": 0.7 - 0.05 * step}
        # Two workers take two batches each ahead of the loop.
        assert mixture.set_weights(weights, from_step=step + 6) == step + 6
    again = sized()
    for step, weights in mixture.history:
        again.set_weights(weights, from_step=step)
    assert seen == plain(again, 14)
    assert len(mixture.history) == 15


def test_weights_change_at_the_first_batch_that_no_loader_has_taken():
    for workers, ahead in ((0, 0), (1, 2), (2, 4)):
        mixture = sized(steps=12)
        for step, _ in enumerate(by_sampler(mixture, 0, 1, workers)):
            if step == 3:
                assert mixture.set_weights(THEN) == 4 + ahead == mixture.step
        assert [step for step, _ in mixture.history] == [0, 4 + ahead]


@pytest.mark.parametrize("step", [1, 5, 11])
def test_state_resumes_to_the_same_batches_with_other_workers(step, tmp_path):
    whole = sized(seed=9)
    changes = {3: THEN, 9: {"web": 0.0, "code": 0.5, "books": 0.5}}
    for first, weights in changes.items():
        whole.set_weights(weights, from_step=first)
    stopped = sized(seed=9)
    for first, weights in changes.items():
        # Those of later steps are planned when the run stops.
        stopped.set_weights(weights, from_step=first)
    torch.save(stopped.state_dict(step), tmp_path / "state.pt")
    state = json.loads(json.dumps(stopped.state_dict(step)))
    mixtures = [sized(seed=0, steps=step + 4) for _ in range(2)]
    for mixture, read in zip(mixtures, (state, torch.load(tmp_path / "state.pt")), strict=True):
        mixture.load_state_dict(read)
        assert mixture.state_dict() == state
    # What was before can still be asked for.
    assert plain(mixture, 1, first=0) == plain(whole, 1)
    loaders = [by_sampler(mixtures[rank], rank, 2, rank) for rank in range(2)]
    assert united(loaders) == plain(whole, 4, first=step)
    assert mixtures[0].drawn(step + 4) == whole.drawn(step + 4)


def test_batches_equal_those_of_the_pipeline():
    pytest.importorskip("datasets")
    from doge_fast.pipeline.domains import BlockSampler

    mixture = sized()
    mixture.set_weights(THEN, from_step=10)
    pipeline = BlockSampler(5, [Phase(0, START), Phase(10, THEN)], 12, SIZES)
    for step in range(20):
        rows = {name: FIRST[name] + rows for name, rows in pipeline.blocks(step).items()}
        assert sorted(plain(mixture, 1, step)[0]) == sorted(np.concatenate(list(rows.values())))


def test_batch_of_a_seed_and_step_never_changes_between_versions():
    """A state names a seed and a step: what they stand for must not change."""
    pinned = [1006, 23, 2004, 51, 34, 1010, 31, 2000, 1011, 24, 2003, 8]
    assert plain(sized(), 1, first=4711) == [pinned]


def test_counts_equal_the_weights_in_expectation_over_seeds():
    seeds = 600
    seen = {2: np.zeros(3), 9: np.zeros(3)}
    for seed in range(seeds):
        mixture = sized(seed=seed)
        mixture.set_weights(THEN, from_step=6)
        for step, sums in seen.items():
            sums += list(mixture.counts(step).values())
    for step, weights in ((2, START), (9, THEN)):
        share = 12 * np.array(list(weights.values()))
        # A count differs from its mean by less than one: five standard errors, at most.
        assert np.abs(seen[step] / seeds - share).max() < 5 * 0.5 / np.sqrt(seeds)


@pytest.mark.parametrize("batch_size", [16, 30, 64])
def test_every_slice_of_a_batch_has_the_mixture_of_the_whole(batch_size):
    mixture = sized(batch_size=batch_size)
    for step in range(40):
        domains = np.array([domain for domain, _ in mixture.draws(step)])
        for pieces in (2, 4, 8):
            for piece in np.array_split(domains, pieces):
                share = np.bincount(domains, minlength=3) * len(piece) / batch_size
                # The order turns by the golden ratio, whose discrepancy is below two rows here.
                assert np.abs(np.bincount(piece, minlength=3) - share).max() < 2


def test_every_epoch_of_a_domain_has_each_row_once_while_weights_change():
    mixture = sized()
    rng = np.random.default_rng(0)
    for step in range(0, 300, 3):
        mixture.set_weights(
            dict(zip(SIZES, rng.dirichlet(np.ones(3)), strict=True)), from_step=step
        )
    drawn = np.concatenate(plain(mixture, 300))
    for name, size in SIZES.items():
        seen = drawn[drawn // 1000 == FIRST[name] // 1000] - FIRST[name]
        # A batch at the border of two epochs mixes them; the counts are exact.
        whole = len(seen) // size
        counts = np.bincount(seen, minlength=size)
        assert counts.min() >= whole
        assert counts.max() <= whole + 1
        assert mixture.drawn(300)[name] == len(seen)


def test_domain_of_weight_zero_is_never_drawn_and_may_be_empty():
    weights = {"web": 0.5, "none": 0.0, "code": 0.5}
    mixture = DomainMixture(
        {"web": range(10), "none": [], "code": range(10)}, weights=weights, batch_size=7
    )
    assert mixture.drawn(100)["none"] == 0
    mixture.set_weights({"web": 0.4, "none": 0.4, "code": 0.2})
    with pytest.raises(ValueError, match="none has no blocks"):
        plain(mixture, 1)


def test_loader_that_would_ignore_the_weights_is_refused():
    for shuffle in (False, True):
        with pytest.raises(TypeError, match="len"):
            list(DataLoader(sized(), batch_size=12, shuffle=shuffle))
    with pytest.raises(TypeError, match="endless"):
        len(sized().batches())


def test_domain_key_adds_the_index_of_the_domain():
    domains = {"a": [{"x": 1}] * 3, "b": [{"x": 2}] * 3}
    mixture = DomainMixture(domains, batch_size=4, domain_key="domain", steps=2)
    for batch in DataLoader(mixture, batch_sampler=mixture.batches()):
        assert batch["domain"].tolist() == (batch["x"] - 1).tolist()


@pytest.mark.parametrize("format", [None, "torch", "numpy"])
def test_hugging_face_datasets_may_be_domains(format):
    datasets = pytest.importorskip("datasets", reason="datasets is an optional dependency")
    table = datasets.Dataset.from_dict({"x": list(range(8))}).with_format(format)
    mixture = DomainMixture({"one": table, "other": table}, batch_size=4, steps=4)
    assert mixture.sizes == {"one": 8, "other": 8}
    batches = [batch["x"].tolist() for batch in by_sampler(mixture, 0, 1, 2)]
    expected = [[int(row["x"]) for row in batch] for batch in plain(mixture, 4)]
    assert batches == expected
    # Two epochs of both.
    assert Counter(np.concatenate(batches).tolist()) == dict.fromkeys(range(8), 2)


def test_accelerate_shares_the_batches_among_ranks():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is an optional dependency")
    mixture = sized(steps=6)
    loader = accelerate.Accelerator(cpu=True).prepare(by_sampler(mixture, 0, 1, 0))
    seen = []
    for step, batch in enumerate(loader):
        seen.append(batch.tolist())
        if step == 1:
            # Its loader is one batch ahead of the loop.
            assert mixture.set_weights(THEN) == 3
    assert seen == plain(mixture, 6)
    # In several processes it cuts the batches of our sampler as we do.
    shard = accelerate.data_loader.BatchSamplerShard
    for rank in range(2):
        whole = sized(steps=5).batches()
        cut = shard(whole, num_processes=2, process_index=rank, split_batches=True)
        assert list(cut) == list(sized(steps=5).batches(rank, 2))
        turns = shard(sized(steps=6).batches(), num_processes=2, process_index=rank)
        assert list(turns) == [sized().draws(step) for step in range(rank, 6, 2)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
def test_state_of_torchdata_loader_resumes_at_the_step_of_the_loop(workers):
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is an optional dependency"
    )

    def loader():
        mixture = sized(steps=9)
        return loaders.StatefulDataLoader(
            mixture, batch_sampler=mixture.batches(), num_workers=workers
        )

    whole, again = loader(), loader()
    batches = iter(whole)
    seen = [next(batches).tolist() for _ in range(4)]
    again.load_state_dict(whole.state_dict())
    assert seen + [batch.tolist() for batch in again] == plain(sized(), 9)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_loader_resumes_from_our_state_alone():
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is an optional dependency"
    )
    mixture, resumed = sized(steps=9), sized(steps=9)
    for step, _ in enumerate(
        loaders.StatefulDataLoader(mixture, batch_sampler=mixture.batches(), num_workers=1)
    ):
        if step == 2:
            mixture.set_weights(THEN)
            resumed.load_state_dict(mixture.state_dict(step + 1))
            break
    loader = loaders.StatefulDataLoader(resumed, batch_sampler=resumed.batches(), num_workers=1)
    assert [batch.tolist() for batch in loader] == plain(mixture, 6, first=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_interrupted_pass_resumes_at_the_step_given_to_seek(workers):
    mixture = sized(steps=9)
    batches = by_sampler(mixture, 0, 1, workers)
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if len(seen) == 4:
            break
    with pytest.raises(RuntimeError, match="seek"):
        next(iter(batches))
    mixture.seek(4)
    with pytest.raises(ValueError, match="from_step=3"):
        mixture.set_weights(THEN, from_step=3)
    assert len(mixture.batches()) == 5
    seen += [batch.tolist() for batch in batches]
    assert seen == plain(sized(), 9)


def test_state_needs_a_step_if_workers_run_ahead():
    mixture = sized(steps=9)
    for step, _ in enumerate(by_sampler(mixture, 0, 1, 1)):
        if step == 2:
            with pytest.raises(ValueError, match="step"):
                mixture.state_dict()
            assert mixture.state_dict(3)["step"] == 3
    alone = sized(steps=9)
    for step, _ in enumerate(by_sampler(alone, 0, 1, 0)):
        assert alone.state_dict()["step"] == step + 1


def test_persistent_workers_refuse_another_seed():
    mixture = sized(seed=1, steps=4)
    loader = by_sampler(mixture, 0, 1, 1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(ValueError, match="seed 5; this one has 1"):
        mixture.load_state_dict(state())
    mixture.load_state_dict(sized(seed=1).state_dict(2))
    assert [batch.tolist() for batch in loader] == plain(sized(seed=1), 2, first=2)


def test_numpy_numbers_become_json_numbers_in_the_state():
    mixture = sized(seed=np.int64(5), batch_size=np.int64(12))
    mixture.set_weights(THEN, from_step=np.int64(2))
    state = json.loads(json.dumps(mixture.state_dict(np.int64(3))))
    again = sized()
    again.load_state_dict(state)
    assert again.draws(4) == mixture.draws(4)


def test_rows_of_each_batch_are_counted_at_most_twice(monkeypatch):
    counted = []
    count = MixtureCounts.counts
    monkeypatch.setattr(
        MixtureCounts,
        "counts",
        lambda self, steps: counted.append(len(steps)) or count(self, steps),
    )
    mixture = sized(steps=40)
    for step, _ in enumerate(by_sampler(mixture, 0, 1, 0)):
        if step % 7 == 0:
            mixture.set_weights(THEN if step % 2 else START)
    # Once for the batch, once for the rows before the next one.
    assert sum(counted) < 2 * 40


def state(**changed) -> dict:
    return {**sized().state_dict(2), **changed}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: sized(batch_size=0), "batch_size >= 1; got 0"),
        (lambda: sized(weights={**START, "web": 0.4}), "sum to 1; they are .*the sum 0.9"),
        (lambda: sized().set_weights({**START, "web": float("nan")}), "must be >= 0"),
        (lambda: sized().batches(2, 2), r"rank must be in \[0, world_size\); got 2 of 2"),
        (lambda: sized().batches(0, 5), "multiple of world_size; got 12 and 5"),
        (lambda: sized().counts(-1), "step >= 0; got -1"),
        (lambda: sized().load_state_dict(state(version=9)), "version 9"),
        (lambda: sized().load_state_dict(state(step=3)), "drawn"),
        (lambda: sized(weights={**START, "other": 0.0}), "weights must be of"),
        (lambda: sized(batch_size=6).load_state_dict(state()), "batch_size 12; .* has 6"),
        (lambda: sized().load_state_dict(state(sizes=[1, 2, 3])), r"sizes \[1, 2, 3\]"),
        (lambda: sized().load_state_dict(state(history=[[1, [1, 0, 0]]])), "begin at step 0"),
    ],
)
def test_misuse_of_a_mixture_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize("number", ["batch_size", "seed"])
def test_numbers_are_not_rounded(number):
    with pytest.raises(TypeError):
        sized(**{number: 2.5})
    with pytest.raises(TypeError):
        sized().set_weights(THEN, from_step=28.9)
