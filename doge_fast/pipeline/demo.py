"""The whole story on text found on this machine: proxies, bases, one table, one report.

Universal generalization: weights learned for all domains, against uniform and natural ones.
Out of domain: weights learned for a domain that nobody trains on, against uniform ones. All
base models see the same number of tokens, start from the same numbers, and are measured on the
same held-out documents. Whichever wins is what the table says.
"""

import logging
from pathlib import Path
from typing import NamedTuple

from doge_fast.pipeline import report
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DemoConfig,
    EvaluateConfig,
    ModelConfig,
    ProxyConfig,
    ReportConfig,
    TrainingConfig,
)
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.proxy import learn_weights

_log = logging.getLogger("doge_fast")


class Story(NamedTuple):
    """The runs of the demo, in the order in which they are made."""

    proxies: tuple[ProxyConfig, ...]
    bases: tuple[BaseConfig, ...]


def tell(config: DemoConfig) -> list[str]:
    """Run the demo, or finish one that was interrupted.

    Args:
        config: where to, how long.

    Returns:
        Lines to print: the table, and where the page is.

    Raises:
        ValueError: a setting is out of its range, or `config.out` holds something else.
    """
    runs = story(config)
    for proxy in runs.proxies:
        _log.info("proxy %s: learning weights for %s", proxy.out.name, " ".join(proxy.target))
        learn_weights(proxy)
    for base in runs.bases:
        _log.info("base %s: training at %s weights", base.out.name, Path(base.weights).name)
        train_base(base)
        evaluate(EvaluateConfig(run=base.out, blocks=config.eval_blocks, device=config.device))
    folders = (*(proxy.out for proxy in runs.proxies), *(base.out for base in runs.bases))
    page = report.write_report(ReportConfig(runs=folders, out=config.out / "report.html"))
    return [report.terminal_table(folders), f"report: {page}"]


def story(config: DemoConfig) -> Story:
    """The demo's runs: two proxies, and the base models that answer what they are good for."""
    universal = _proxy(config, "universal")
    target = config.target
    elsewhere = _proxy(config, f"for-{target}", target=(target,))
    return Story(
        proxies=(universal, elsewhere),
        bases=(
            _base(config, "uniform", "uniform"),
            _base(config, "natural", "natural"),
            _base(config, "learned", str(universal.out)),
            _base(config, f"uniform-without-{target}", "uniform", targets=(target,)),
            _base(config, f"learned-for-{target}", str(elsewhere.out), targets=(target,)),
        ),
    )


def _proxy(
    config: DemoConfig, name: str, *, target: tuple[str, ...] = ("universal",)
) -> ProxyConfig:
    return ProxyConfig(
        out=config.out / f"proxy-{name}",
        corpus=_corpus(config),
        model=ModelConfig(model=config.proxy_model),
        training=_training(config, config.proxy_steps),
        target=target,
        sequences_per_domain=config.sequences_per_domain,
        mu=config.mu,
        domain_max_grad_norm=config.domain_max_grad_norm,
    )


def _base(
    config: DemoConfig, name: str, weights: str, *, targets: tuple[str, ...] = ()
) -> BaseConfig:
    return BaseConfig(
        out=config.out / f"base-{name}",
        corpus=_corpus(config),
        model=ModelConfig(model=config.base_model),
        training=_training(config, config.base_steps),
        weights=weights,
        targets=targets,
        batch_size=config.batch_size,
    )


def _corpus(config: DemoConfig) -> CorpusConfig:
    return CorpusConfig(data=config.data, vocab_size=config.vocab_size, cache_dir=config.cache_dir)


def _training(config: DemoConfig, steps: int) -> TrainingConfig:
    return TrainingConfig(
        steps=steps,
        warmup_steps=steps // 10,
        learning_rate=config.learning_rate,
        min_learning_rate=config.learning_rate / 5,
        seed=config.seed,
        device=config.device,
        # The table is measured afterwards; this is one point of a curve.
        eval_blocks=min(32, config.eval_blocks),
    )
