"""Select the parameters for a proxy's generalization estimation, by cancellation effect.

A fresh proxy is trained for T_c steps on batches drawn uniformly from all domains, and every
parameter tensor is scored during training. The run keeps the scores and the lists of names that
`doge-fast proxy --selection` reads, and discards the model.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from doge_fast.cancellation import READINGS, CancellationEffect, parse_strategy, select
from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import baselines, records, stage, tables
from doge_fast.pipeline.config import SelectConfig
from doge_fast.pipeline.domains import Batch
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.trainer import MixtureTrainer, from_first
from doge_fast.weights import weights_file


def measure_cancellation(config: SelectConfig) -> Path:
    """Score a proxy's parameters and select some of them; write both to a run directory.

    The directory holds config.json, metrics.jsonl, a list of names selection-STRATEGY.json for each
    strategy, and cancellation.json (every parameter's columns and its score in every reading). The
    same call resumes a killed run, with bitwise the same result, and leaves a complete run
    unchanged.

    Args:
        config: model, corpus, training and strategies.

    Returns:
        The run directory.

    Raises:
        UserError: a strategy selects more parameters than the model has, the corpus is unusable,
            or the directory holds another run; nothing has been written. Or the training has
            diverged; no selection is written.

    Source: DoGE, appendix cancellation.
    """
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if not existing.is_complete:
        trainer = selection_trainer(config, existing)
        with stage.directory(trainer, existing) as checkpoint:
            trainer.go_on(checkpoint)
            from_first(lambda: _write_selections(trainer))
    return config.out


def selection_trainer(config: SelectConfig, existing: ExistingRun) -> "SelectionTrainer":
    """Read the corpus and build the model; return the run's trainer."""

    def check(model: nn.Module, *_: object) -> None:
        number = sum(param.requires_grad for param in model.parameters())
        for strategy in config.strategies:
            if parse_strategy(strategy)[1] > number:
                raise UserError(
                    f"{strategy} selects more parameters than the {number} of "
                    f"{config.model.model}. Name others with strategies, as --strategies low10 "
                    "high10."
                )

    corpus, model = stage.corpus_and_model(config, existing, check=check)
    phase = Phase(0, baselines.uniform(corpus.tokens))
    return SelectionTrainer(config, corpus, model, (phase,))


def selection_table(run: Path) -> str:
    """Selections of a finished run, as a plain-text table."""
    selections = records.load_cancellation(run).selections
    rows = [(each.file, str(each.parameters), f"{each.share:.2%}") for each in selections]
    return tables.text(tables.table_of(("selection", "parameters", "of columns"), rows))


class SelectionTrainer(MixtureTrainer):
    """MixtureTrainer that scores its steps; checkpoints hold the sums so far."""

    state_file = "cancellation.safetensors"
    config: SelectConfig
    effect: CancellationEffect
    """The scores; set when training creates the optimizer."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, observed by `effect`."""
        optimizer = super().create_optimizer(model)
        if not hasattr(self, "effect"):
            self.effect = CancellationEffect(cast(nn.Module, self.model), optimizer)
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run Trainer's step on one example at a time, observed by `effect`."""
        num_ranks, num_examples = self.args.world_size, len(inputs["input_ids"])
        losses = []
        # No synchronisation: the scores need the gradients of this rank's examples.
        with self.accelerator.no_sync(model):
            for row in range(num_examples):
                example = {key: value[row : row + 1] for key, value in inputs.items()}
                with self.effect.watching():
                    losses.append(super().training_step(model, example, num_items_in_batch))
        mean = torch.stack(losses).mean()
        self.step_loss = self.mean_of_ranks(mean)
        if num_ranks > 1:
            self.effect.sum_over_ranks(self.accelerator.reduce)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(num_examples * num_ranks)
        return mean

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Sums of the scores so far."""
        return self.effect.state_dict(), {}

    def load_own_state(self, state: dict[str, Tensor], text: dict[str, str]) -> None:
        """Restore the sums."""
        self.effect.load_state_dict(state)


def _write_selections(trainer: SelectionTrainer) -> None:
    """Write a file for each strategy, then the scores; the model is not kept."""
    config, effect = trainer.config, trainer.effect
    records.keep_metrics(config.out)
    scores = {reading: effect.scores(reading) for reading in READINGS}
    selections = []
    for strategy in config.strategies:
        selection = select(scores[config.reading], strategy, columns=effect.columns)
        file = f"selection-{strategy}.json"
        weights_file.write_json(config.out / file, list(selection.names))
        selections.append(
            {
                "file": file,
                "strategy": strategy,
                "reading": config.reading,
                "parameters": len(selection.names),
                "columns": selection.num_columns,
                "share": selection.share,
            }
        )
    record = {
        "schema_version": weights_file.SCHEMA_VERSION,
        "steps": effect.num_steps,
        "columns": effect.columns,
        "scores": scores,
        "terms": {reading: effect.terms(reading) for reading in READINGS},
        "selections": selections,
        "versions": records.versions(),
    }
    weights_file.write_json(config.out / records.CANCELLATION, record)
