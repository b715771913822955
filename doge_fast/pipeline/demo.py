"""Demo of the whole method on text of this machine: train a proxy, then search a temperature."""

import logging
import math
from dataclasses import replace

from doge_fast.pipeline import base, proxy, rehearsal, stage
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DemoConfig,
    ProxyConfig,
    TemperatureConfig,
    TrainingConfig,
)
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.temperature import lines_of, temperature
from doge_fast.pipeline.wording import plural

# Temperatures: the three that a search begins with, and one more.
MOST_RUNS = 4
# Held-out blocks per domain.
BLOCKS = 128

_log = logging.getLogger("doge_fast")


def demo(config: DemoConfig) -> list[str]:
    """Learn weights with a proxy, and search their best temperature with base models.

    `config.out` holds proxy/ and temperature/; the latter has weights.json and report.html. The
    same call resumes a killed demo.

    Args:
        config: text, target and number of steps.

    Returns:
        Lines to print: tables, result of the search, and paths of the weights and the report.

    Raises:
        UserError: the corpus lacks the target.
    """
    first = ProxyConfig(
        config.out / "proxy",
        CorpusConfig(config.data, vocab_size=2048, cache_dir=config.cache_dir),
        # At a learning rate of 2e-3, runs of this length leave their first plateau at a random
        # step, which changes perplexities more than the weights do.
        training=TrainingConfig(
            config.steps,
            learning_rate=1e-3,
            min_learning_rate=2e-4,
            seed=config.seed,
            # Few blocks: the search measures its models on more.
            eval_blocks=16,
            device=config.device,
        ),
        target=(config.target,),
    )
    _tell_time(first)
    learned = proxy.learn_weights(first).path
    search = temperature(
        TemperatureConfig(
            learned,
            out=config.out / "temperature",
            steps=config.steps,
            seeds=(config.seed,),
            most_runs=MOST_RUNS,
            eval_blocks=BLOCKS,
            device=config.device,
        )
    ).path
    return [terminal_table([search]), *lines_of(search)]


def _tell_time(config: ProxyConfig) -> None:
    """Log an upper bound on the demo's time, from a few steps of the proxy and a base model."""
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return
    trainer = proxy.proxy_trainer(config, existing)
    corpus, steps = trainer.corpus, config.training.steps
    of_proxy = rehearsal.seconds_per_step(trainer)
    model = BaseConfig(
        config.out.with_name("temperature"),
        replace(config.corpus, domains=corpus.names),
        config.model,
        config.training,
        targets=corpus.targets,
        batch_size=config.sequences_per_domain * len(corpus.names),
    )
    of_base = rehearsal.seconds_per_step(base.base_trainer(model, ExistingRun(None, False)))
    # A held-out block takes a forward pass alone, about a third of the time of a step.
    held = len(corpus.validation) * BLOCKS / 3 / model.batch_size
    seconds = steps * of_proxy + MOST_RUNS * (steps + held) * of_base
    _log.info(
        "about %s: a proxy of %d steps at %.2g s, and up to %d base models at %.2g s",
        *(plural(math.ceil(seconds / 60), "minute"), steps, of_proxy, MOST_RUNS, of_base),
    )
