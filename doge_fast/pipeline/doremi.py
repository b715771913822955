"""The DoReMi baseline: domain weights by group DRO on the excess loss over a reference model.

The reference is a base run. A fresh proxy trains on batches drawn at the reference's weights; a
domain with a larger loss under the proxy than under the reference gains weight in the proxy's
loss. The result is the mean weights over the steps. Unlike DoGE this needs two trained models, and
a forward pass of the reference on every batch of the proxy. `doge_fast.weights.group_dro` holds the
mathematics, and the differences between the paper, its authors' code and DoGE's.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from doge_fast.losses import token_losses
from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import records, stage
from doge_fast.pipeline.config import DoReMiConfig
from doge_fast.pipeline.domains import Corpus
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.tokenizer import open_tokenizer, tokenizer_sha256
from doge_fast.pipeline.trainer import ByName, MixtureTrainer, from_first
from doge_fast.weights import group_dro
from doge_fast.weights.group_dro import SMOOTHING, STEP_SIZE, ExcessWeights

_SHA256 = "reference_sha256"


def learn_by_excess_loss(config: DoReMiConfig) -> Run:
    """Learn domain weights with DoReMi; write them to a run directory.

    The directory holds config.json, metrics.jsonl (weights and average weights from step 0),
    weights.json and model/. The same call resumes a killed run, with bitwise the same result, and
    leaves a complete run unchanged.

    Args:
        config: reference, corpus, model and training of the proxy.

    Returns:
        The run: its directory, weights and figures.

    Raises:
        UserError: the reference is not a finished base run on these domains with this tokenizer
            and block size, the corpus is unusable, or the directory holds another run; nothing has
            been written. Or a resumed run's reference model has changed.

    Source: DoReMi (Xie et al., NeurIPS 2023), steps 1 and 2; DoGE, section 4, the baseline.
    """
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return Run(config.out)
    trainer = doremi_trainer(config, existing)
    with stage.directory(trainer, existing) as checkpoint:
        trainer.go_on(checkpoint)
        from_first(lambda: _write_excess_weights(trainer))
    return Run(config.out)


def doremi_trainer(config: DoReMiConfig, existing: ExistingRun) -> "DoReMiTrainer":
    """Read the reference and the corpus, build the model; return the run's trainer."""
    # Opened before the corpus is packed, which may take hours.
    reference = _open_reference(config)
    corpus, model = stage.corpus_and_model(
        config,
        existing,
        check=lambda _, *text: _check_text(config.reference, *text),
        # Targets that the reference only measured have no weight, so they are not trained on here.
        followed=[*records.load_config(config.reference)[0].corpus.targets],
    )
    weights = {name: reference.weights[name] for name in corpus.names}
    return DoReMiTrainer(config, corpus, model, reference._replace(weights=weights))


class Reference(NamedTuple):
    """The model that the proxy's losses are compared with."""

    model: PreTrainedModel
    weights: dict[str, float]
    """Its training weights: batches are drawn at them, and the learned weights start from them."""
    record: Json
    """Its description in weights.json."""


class DoReMiTrainer(MixtureTrainer):
    """Trainer with a loss weighted by domain; the weights follow the excess loss."""

    state_file = "doremi.safetensors"
    has_domain_ids = True
    config: DoReMiConfig

    def __init__(
        self, config: DoReMiConfig, corpus: Corpus, model: PreTrainedModel, reference: Reference
    ) -> None:
        super().__init__(config, corpus, model, (Phase(0, reference.weights),))
        device = self.args.device
        self.against = reference
        self.reference = reference.model.train(False).requires_grad_(False)
        nn.Module.to(self.reference, device)
        # Settings that are not given take the variant's defaults.
        variant = config.variant
        given = {"step_size": config.step_size, "smoothing": config.smoothing}
        usual = {"step_size": STEP_SIZE[variant], "smoothing": SMOOTHING[variant]}
        self.rule = {name: usual[name] if value is None else value for name, value in given.items()}
        alpha_K = torch.tensor(list(reference.weights.values()), dtype=torch.float64)
        self.sampling_K = (alpha_K / alpha_K.sum()).to(device)
        self.weights = ExcessWeights(
            alpha=self.sampling_K,
            alpha_mean=self.sampling_K,
            excess=torch.full_like(self.sampling_K, group_dro.UNSEEN),
            num_steps=torch.zeros((), dtype=torch.float64, device=device),
        )
        self.domain_losses = self.reference_losses = torch.full_like(self.sampling_K, math.nan)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Update the weights, then weight the batch's losses with them."""
        assert not return_outputs, "only training asks here"
        ids_BL, labels_BL = inputs["input_ids"], inputs["labels"]
        domain_ids_B = inputs["domain_ids"]
        # The reference runs first, so that its logits are freed before the proxy's are computed.
        with torch.no_grad(), self.accelerator.autocast():
            logits_BLV = self.reference(input_ids=ids_BL, use_cache=False).logits
        reference_BT = token_losses(logits_BLV, labels_BL)
        del logits_BLV
        losses_BT = token_losses(model(input_ids=ids_BL, use_cache=False).logits, labels_BL)
        # Gather the whole batch: the ranks hold equal parts of its rows, in order.
        gather = self.accelerator.gather
        all_B = gather(domain_ids_B)
        self._move(gather(losses_BT.detach()), gather(reference_BT), all_B)
        shares_B = group_dro.example_shares(
            self.weights.alpha, self.sampling_K, all_B, variant=self.config.variant
        ).view(self.args.world_size, -1)[self.args.process_index]
        # Times the number of ranks, since DistributedDataParallel averages gradients over them.
        return losses_BT.mean(1) @ shares_B.to(losses_BT.dtype) * self.args.world_size

    def _move(self, losses_BT: Tensor, reference_BT: Tensor, domain_ids_B: Tensor) -> None:
        num_domains = len(self.sampling_K)
        self.domain_losses = group_dro.domain_means(losses_BT, domain_ids_B, num_domains)
        self.reference_losses = group_dro.domain_means(reference_BT, domain_ids_B, num_domains)
        excess_K = group_dro.excess_losses(
            losses_BT, reference_BT, domain_ids_B, self.weights.excess, variant=self.config.variant
        )
        self.weights = self.weights.moved(excess_K, **self.rule)

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights, and the hash of the reference model."""
        return self.weights._asdict(), {_SHA256: self.against.record["model_sha256"]}

    def load_own_state(self, state: dict[str, Tensor], text: dict[str, str]) -> None:
        """Restore the weights; raise UserError if the reference model has changed."""
        before, now = text[_SHA256], self.against.record["model_sha256"]
        if before != now:
            raise UserError(
                f"{self.config.out} began with a reference model of hash {before[:12]}; that run's "
                f"model has {now[:12]} now. Restore it, or start anew in another directory."
            )
        device = self.args.device
        self.weights = ExcessWeights(**{key: value.to(device) for key, value in state.items()})

    def first_weights(self) -> dict[str, float]:
        """The reference's weights."""
        return self.against.weights

    def line(self, step: int) -> Json:
        """Losses, excess losses and weights of the step.

        The losses of a domain absent from the batch are null; so is its excess before its first
        batch.
        """
        names, weights = self.corpus.names, self.weights
        return {
            "loss": ByName(names, self.domain_losses),
            "reference_loss": ByName(names, self.reference_losses),
            "excess": ByName(names, weights.excess.where(weights.excess >= 0, math.nan)),
            "alpha": ByName(names, weights.alpha),
            "alpha_mean": ByName(names, weights.alpha_mean),
            "tokens": self.tokens(step),
        }


def _write_excess_weights(trainer: DoReMiTrainer) -> None:
    """Write the average weights, then the model."""
    config, weights = trainer.config, trainer.weights
    stage.leave_learned_weights(
        trainer,
        ByName(trainer.corpus.names, weights.alpha_mean).read(),
        weights.alpha,
        columns={"reference_weight": trainer.against.weights},
        method="doremi",
        variant=config.variant,
        **trainer.rule,
        batch_size=config.batch_size,
        reference=trainer.against.record,
    )
    stage.leave_model(trainer)


def _open_reference(asked: DoReMiConfig) -> Reference:
    """Open the model of a finished base run with positive weights for all domains.

    Raises:
        UserError: the run is not such a run or has another block size; or it has other domains or
            another tokenizer, as far as these are known before the corpus is read.
    """
    run, corpus = asked.reference, asked.corpus
    record, config = records.load_config(run)
    if record.stage != "base":
        raise UserError(
            f"reference must be a base run; {run} holds a {record.stage} run. Train one with "
            "doge-fast base, at the reference weights."
        )
    records.check_finished(run)
    weights = records.weights_by_name(records.read_weights(run, domains=corpus.domains or None))
    _check_same(run, "blocks of", record.corpus.block_size, corpus.block_size)
    if corpus.tokenizer != "train":
        _check_text(run, tuple(weights), open_tokenizer(corpus, {}))
    if absent := [name for name, weight in weights.items() if weight <= 0]:
        raise UserError(
            f"Every domain needs a weight above zero in the reference run; {run} has none for "
            f"{', '.join(absent)}. Leave it out of domains in both runs, or train another "
            "reference."
        )
    model = open_model(run / records.MODEL)
    files = records.read_manifest(run / records.MODEL, is_hashed=False)["files"]
    # Hash all weight files of the model.
    digests = [files[name]["sha256"] for name in sorted(files) if name.endswith(".safetensors")]
    steps = config.training.steps
    told = {
        "run": str(run),
        "model": config.model.model,
        "model_sha256": hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest(),
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens": steps * config.batch_size * corpus.block_size,
        "seed": config.training.seed,
    }
    return Reference(model, weights, told)


def _check_text(run: Path, names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Check domains and tokenizer: losses can be subtracted only on the same tokens."""
    records.read_weights(run, domains=names)
    there = records.load_config(run)[0].corpus.tokenizer_sha256
    _check_same(run, "the tokenizer", there, tokenizer_sha256(tokenizer))


def _check_same(run: Path, what: str, there: str | int, here: str | int) -> None:
    if there != here:
        raise UserError(
            f"The reference {run} was trained with {what} {str(there)[:12]}; this corpus has "
            f"{str(here)[:12]}. Give both the same data, domains, targets, tokenizer and "
            "block_size (--block-size)."
        )
