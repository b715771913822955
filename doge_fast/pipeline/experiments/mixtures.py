"""Weights that follow from other runs, written when the run that trains at them begins."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from doge_fast import failures
from doge_fast.pipeline import records, swarm
from doge_fast.pipeline.base import resolve_phases
from doge_fast.pipeline.config import BaseConfig
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.experiments.planner import Best, Drawn
from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.reporting.regret import swarm_of
from doge_fast.pipeline.reporting.runs import open_runs

# Of every drawn mixture this share is uniform: nothing is known of domains without any text.
_SMOOTHING = 0.02


def write(recipe: Drawn | Best, config: BaseConfig) -> None:
    """Make the weights that a base run reads, unless they are there.

    Args:
        recipe: how.
        config: of the run; `weights` is the file.
    """
    file = Path(config.weights)
    if file.exists():
        return
    if isinstance(recipe, Best):
        names: Sequence[str] = config.corpus.domains
        runs = swarm_of(
            open_runs([config.out.parent]), recipe.apart, open_runs(recipe.swarm[:1])[0]
        )
        weights_K = swarm.fitted(swarm.read([run.path for run in runs], names)).best_K
    else:
        names, weights_K = _drawn(recipe, config)
    entries = [
        {"name": name, "weight": float(weight)}
        for name, weight in zip(names, weights_K, strict=True)
    ]
    with failures.writing(file):
        method = "regression" if isinstance(recipe, Best) else "drawn"
        records.write_weights(file, {"method": method, "domains": entries})


def _drawn(recipe: Drawn, config: BaseConfig) -> tuple[Sequence[str], Floats]:
    """w ~ Dirichlet(concentration K centre), a little of it uniform."""
    corpus = load_corpus(config.corpus, targets=config.targets)
    (phase,) = resolve_phases(replace(config, weights=str(recipe.around)), corpus)
    centre_K = np.array([phase.weights[name] for name in corpus.names])
    number = len(centre_K)
    draw = np.random.default_rng([recipe.number, config.training.seed, number])
    drawn_K = draw.dirichlet(recipe.concentration * number * centre_K)
    return corpus.names, (1 - _SMOOTHING) * drawn_K + _SMOOTHING / number
