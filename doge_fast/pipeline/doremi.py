"""The DoReMi baseline: domain weights by group DRO on the loss in excess of a reference model's.

A base run is the reference. A fresh proxy sees batches drawn at the reference's weights; a domain
whose tokens it predicts worse than the reference does gains weight in the proxy's loss. The
result is the mean of the weights over the steps. Unlike DoGE this takes two trained models, and
a forward pass of the reference on every batch of the proxy.

Followed are DoReMi (Xie et al., NeurIPS 2023, Algorithm 1) and, where its paper and its authors'
code differ, the code:

- Batches are drawn at the reference's weights, and the weights start there; in the loss they are
  divided by what was drawn. The paper draws uniformly and starts at uniform.
- A domain without tokens in a batch keeps its last excess, at first log V, as if nothing had been
  learned of it. The paper has every domain in every batch.
- Smoothing is 1e-4; the paper's is 1e-3.

One thing is the paper's: the mean is over the weights of steps 1 to T, and not over the initial
ones too. The variant "doge" is the baseline that DoGE's authors compared with; `excess_losses`,
`example_shares` and `STEP_SIZE` say where it differs. Not kept of it: the reference in training
mode (so with dropout) and in the graph, and cutting the gradient to `max_grad_norm` anew after
each domain is added to it, which makes the step depend on the order of the domains; here it is cut
once, as everywhere.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from doge_fast import simplex
from doge_fast.pipeline import baselines, domains, records, training
from doge_fast.pipeline.config import DoReMiConfig
from doge_fast.pipeline.domains import BaseBatches, Corpus
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.training import ByName, RecordedTrainer, Task

Variant = Literal["doremi", "doge"]

STEP_SIZE: dict[Variant, float] = {"doremi": 1.0, "doge": 0.1}
"""eta of the weights' step. DoReMi: paper and code. DoGE's code: fixed, whatever the learning rate
and mu are."""
SMOOTHING: dict[Variant, float] = {"doremi": 1e-4, "doge": 0.0}
"""Mixture with uniform. DoReMi: its code; its paper has 1e-3. DoGE's code: none."""

# What a checkpoint holds beside Trainer's own files.
_STATE = "doremi.safetensors"
_SHA256 = "reference_sha256"


class DomainWeights(NamedTuple):
    """What group DRO knows after a step; all float64."""

    alpha: Tensor
    """[K], on the simplex: the weights of the step's loss."""
    alpha_mean: Tensor
    """[K]: their mean over the steps."""
    excess: Tensor
    """[K], >= 0; nats per token: lambda, what moved them."""
    num_steps: Tensor
    """Scalar."""

    def moved(self, excess_K: Tensor, *, step_size: float, smoothing: float) -> "DomainWeights":
        """The weights one step of exponentiated gradient ascent further.

        alpha'_k     =  alpha_k exp(eta lambda_k) / sum_i alpha_i exp(eta lambda_i)
        alpha_k      =  (1 - c) alpha'_k + c / K
        alpha_bar_k  =  mean of alpha_k over the steps

        lambda is `excess_K`.

        Args:
            excess_K: [K] float64; nats per token.
            step_size: eta > 0.
            smoothing: c in [0, 1).

        Raises:
            ValueError: `smoothing` is out of its range.

        Source: DoReMi (Xie et al., NeurIPS 2023), Algorithm 1.
        """
        alpha_K = simplex.mirror_step(self.alpha, excess_K, lr=step_size, mu=1.0)
        alpha_K = simplex.smooth(alpha_K, smoothing)
        count = self.num_steps + 1
        mean_K = simplex.running_mean(self.alpha_mean, alpha_K, count)
        return DomainWeights(alpha_K, mean_K, excess_K, count)


class WeightUpdate(NamedTuple):
    """How the weights move, every setting resolved."""

    variant: Variant
    step_size: float
    smoothing: float


class Reference(NamedTuple):
    """A finished base run, as far as it is needed here."""

    model: PreTrainedModel
    weights: dict[str, float]
    """{domain: weight} that it was trained at, in the corpus's order."""
    record: dict[str, Any]
    """What weights.json says of it."""


def token_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """[B, L - 1] cross-entropy of every predicted token, in nats and float32.

    Args:
        logits_BLV: [B, L, V] floating; position p predicts token p + 1.
        labels_BL: [B, L] int64, all of them tokens: blocks have no padding.
    """
    targets_BT = labels_BL[:, 1:]
    logits_NV = logits_BLV[:, :-1].flatten(0, 1).float()
    losses_N = F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="none")
    return losses_N.view_as(targets_BT)


def domain_means(values_BT: Tensor, domain_ids_B: Tensor, num_domains: int) -> Tensor:
    """[K] float64: mean over the tokens of each domain; NaN for a domain without any.

    Args:
        values_BT: [B, T]; a number for every token.
        domain_ids_B: [B] int64 in [0, K): which domain an example is of.
        num_domains: K.
    """
    ids_K1 = torch.arange(num_domains, device=domain_ids_B.device).unsqueeze(1)
    # A product, not index_add: the latter adds in any order on a GPU.
    is_of_KB = (domain_ids_B == ids_K1).double()
    return is_of_KB @ values_BT.double().mean(1) / is_of_KB.sum(1)


def excess_losses(
    losses_BT: Tensor,
    reference_BT: Tensor,
    domain_ids_B: Tensor,
    last_K: Tensor,
    *,
    variant: Variant = "doremi",
) -> Tensor:
    """How much worse than the reference the proxy predicts each domain, [K] float64, >= 0.

    doremi:  lambda_k  =  mean over the tokens t of k of  max(0, l_t - l_ref,t)
    doge:    lambda_k  =  max(0, mean_t l_t - mean_t l_ref,t)

    The first counts tokens that the proxy predicts worse even where it is better on average, so
    it is never the smaller one. A domain without tokens in the batch keeps its last value.

    Args:
        losses_BT: [B, T]; of the proxy, nats.
        reference_BT: [B, T]; of the reference model, on the same tokens.
        domain_ids_B: [B] int64 in [0, K).
        last_K: [K] float64; the values of the step before.
        variant: doremi follows DoReMi's paper and its authors' code; doge the baseline in DoGE's
            published code.

    Source: DoReMi (Xie et al., NeurIPS 2023), Algorithm 1, lambda_t[i].
    """
    difference_BT = losses_BT - reference_BT
    if variant == "doremi":
        difference_BT = difference_BT.clamp(min=0)
    excess_K = domain_means(difference_BT, domain_ids_B, len(last_K)).clamp(min=0)
    ids_K1 = torch.arange(len(last_K), device=domain_ids_B.device).unsqueeze(1)
    is_present_K = (domain_ids_B == ids_K1).any(1)
    return torch.where(is_present_K, excess_K, last_K)


def example_shares(
    alpha_K: Tensor, sampling_K: Tensor, domain_ids_B: Tensor, *, variant: Variant = "doremi"
) -> Tensor:
    """How much each example's mean loss counts in the loss of the proxy, [B].

    doremi:  r_b  =  w_k(b) / sum_b' w_k(b'),   w_k = alpha_k / s_k
    doge:    r_b  =  alpha_k(b) / B_k(b)

    s are the weights that the batch was drawn at, k(b) is the domain of example b, B_k the number
    of examples of k. The first is DoReMi's normalisation: the shares sum to one, and a domain of
    which more was drawn than its s_k B counts more. The second makes the loss sum_k alpha_k l_k,
    l_k being the domain's mean loss, over the domains in the batch.

    Args:
        alpha_K: [K], on the simplex; this step's.
        sampling_K: [K], > 0; the weights that the batch was drawn at.
        domain_ids_B: [B] int64 in [0, K).
        variant: doremi follows the code of DoReMi's authors; doge DoGE's published code.

    Source: DoReMi (Xie et al., NeurIPS 2023), eq. (1).
    """
    if variant == "doremi":
        ratios_B = (alpha_K / sampling_K)[domain_ids_B]
        return ratios_B / ratios_B.sum()
    is_same_BB = domain_ids_B.unsqueeze(0) == domain_ids_B.unsqueeze(1)
    return alpha_K[domain_ids_B] / is_same_BB.sum(1)


class DoReMiTrainer(RecordedTrainer):
    """Trainer whose loss is weighted by domain, with weights that follow the excess loss."""

    def __init__(
        self,
        *args: Any,
        reference: Reference,
        rule: WeightUpdate,
        start: DomainWeights,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        device = self.args.device
        self.reference = reference.model.train(False).requires_grad_(False)
        nn.Module.to(self.reference, device)
        self.reference_sha256 = str(reference.record["model_sha256"])
        self.rule = rule
        self.weights = DomainWeights(*(each.to(device) for each in start))
        self.sampling_K = self.weights.alpha
        self.domain_losses = self.reference_losses = torch.full_like(self.sampling_K, math.nan)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Move the weights, then weigh the batch's losses with them."""
        assert not return_outputs, "only training asks here"
        ids_BL, labels_BL = inputs["input_ids"], inputs["labels"]
        domain_ids_B = inputs["domain_ids"]
        # First, so that its logits are gone before the proxy's are there.
        reference_BT = self._reference_losses(ids_BL, labels_BL)
        losses_BT = token_losses(model(input_ids=ids_BL, use_cache=False).logits, labels_BL)
        self._move(losses_BT.detach(), reference_BT, domain_ids_B)
        shares_B = example_shares(
            self.weights.alpha, self.sampling_K, domain_ids_B, variant=self.rule.variant
        )
        return losses_BT.mean(1) @ shares_B.to(losses_BT.dtype)

    @torch.no_grad()
    def _reference_losses(self, ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
        with self.accelerator.autocast():
            logits_BLV = self.reference(input_ids=ids_BL, use_cache=False).logits
        return token_losses(logits_BLV, labels_BL)

    def _move(self, losses_BT: Tensor, reference_BT: Tensor, domain_ids_B: Tensor) -> None:
        num_domains = len(self.sampling_K)
        self.domain_losses = domain_means(losses_BT, domain_ids_B, num_domains)
        self.reference_losses = domain_means(reference_BT, domain_ids_B, num_domains)
        excess_K = excess_losses(
            losses_BT, reference_BT, domain_ids_B, self.weights.excess, variant=self.rule.variant
        )
        self.weights = self.weights.moved(
            excess_K, step_size=self.rule.step_size, smoothing=self.rule.smoothing
        )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        state = {key: value.cpu() for key, value in self.weights._asdict().items()}
        save_file(state, folder / _STATE, metadata={_SHA256: self.reference_sha256})

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path, device = Path(resume_from_checkpoint) / _STATE, str(self.args.device)
        with safe_open(path, framework="pt", device=device) as file:
            began_with = file.metadata()[_SHA256]
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if began_with != self.reference_sha256:
            raise ValueError(
                f"{self.task.out} began with a reference model of hash {began_with[:12]}; that "
                f"run's model has {self.reference_sha256[:12]} now. Restore it, or start anew in "
                "another directory."
            )
        self.weights = DomainWeights(**state)


def learn_by_excess_loss(config: DoReMiConfig) -> Path:
    """Learn domain weights as DoReMi does; leave them in a run directory.

    The directory holds config.json, metrics.jsonl (weights raw and averaged from step 0),
    weights.json and model/. A run that was killed is resumed by the same call, to the same bits;
    a run that is complete is left as it is.

    Args:
        config: against which reference, from what, with what, for how long.

    Returns:
        The run directory.

    Raises:
        ValueError: a setting is out of its range; the reference is not a finished base run on
            these domains with this tokenizer and block size; the corpus is not what it should
            be, or the directory holds another run; nothing has been written. Or the run is
            resumed and the reference is no longer the model that it began with.

    Source: DoReMi (Xie et al., NeurIPS 2023), steps 1 and 2; DoGE, section 4, the baseline.
    """
    rule = _rule(config)
    if records.check_run(config.out, stage="doremi", config=config) and training.closed(config.out):
        return config.out
    recorded = _read_reference(config.reference)
    corpus = domains.load_corpus(config.corpus, targets=config.targets)
    reference = _open_reference(config.reference, recorded, corpus)
    model = training.fresh_model(config.model, config.training, corpus)
    records.open_run(config.out, stage="doremi", config=config, **corpus.recorded())
    start = _start(reference, corpus, rule)
    task = Task(
        out=config.out,
        model=model,
        trainer=partial(DoReMiTrainer, reference=reference, rule=rule, start=start),
        batches=partial(_batches, config, corpus, reference),
        measure=partial(_measure, _batches(config, corpus, reference, 0)),
        first_line=_first_line(reference),
        held_out=corpus.validation,
        log_every=config.log_every,
    )
    trainer = training.train(task, config.training)
    assert isinstance(trainer, DoReMiTrainer)
    records.write_weights(config.out, _weights_record(config, corpus, reference, trainer))
    training.finish(config.out, trainer, corpus.tokenizer)
    return config.out


def _rule(config: DoReMiConfig) -> WeightUpdate:
    """The settings of the variant where none is given, checked."""
    if config.variant not in STEP_SIZE:
        raise ValueError(f"variant must be {' or '.join(STEP_SIZE)}; got {config.variant!r}.")
    for name in ("batch_size", "log_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(config, name)}.")
    step_size = STEP_SIZE[config.variant] if config.step_size is None else config.step_size
    if not 0 < step_size < math.inf:
        raise ValueError(f"step_size must be positive and finite; got {step_size}.")
    smoothing = SMOOTHING[config.variant] if config.smoothing is None else config.smoothing
    simplex.check_smoothing(smoothing)
    return WeightUpdate(config.variant, step_size, smoothing)


def _read_reference(run: Path) -> dict[str, Any]:
    """config.json of the reference, if it is a finished base run."""
    record = records.read_config(run)
    if record["stage"] != "base":
        raise ValueError(
            f"reference must be a base run; {run} holds a {record['stage']} run. Train one with "
            "doge-fast base, at the reference weights."
        )
    if not training.is_finished(run):
        raise ValueError(
            f"reference must be a complete run; {run} has no {training.MODEL}/. Repeat the "
            "command that began it; it resumes."
        )
    return record


def _open_reference(run: Path, recorded: Mapping[str, Any], corpus: Corpus) -> Reference:
    weights = records.weights_by_name(records.read_weights(run, domains=corpus.names))
    _check_reference(run, recorded["corpus"], weights, corpus)
    model = open_model(run / training.MODEL)
    config = recorded["config"]
    steps = config["training"]["steps"]
    record = {
        "run": run,
        "model": config["model"]["model"],
        "model_sha256": _sha256(run / training.MODEL),
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens": steps * config["batch_size"] * corpus.block_size,
        "seed": config["training"]["seed"],
    }
    return Reference(model, weights, record)


def _check_reference(
    run: Path, recorded: Mapping[str, Any], weights: Mapping[str, float], corpus: Corpus
) -> None:
    """Losses on the same tokens can be subtracted, and weights can be divided by."""
    same = {
        "the tokenizer": ("tokenizer_sha256", corpus.tokenizer_sha256),
        "blocks of": ("block_size", corpus.block_size),
    }
    for what, (key, ours) in same.items():
        if recorded[key] != ours:
            there, here = (str(value)[:12] for value in (recorded[key], ours))
            raise ValueError(
                f"The reference {run} was trained with {what} {there}; this corpus has {here}. "
                "Give both the same data, domains, targets, tokenizer and block_size "
                "(--block-size)."
            )
    absent = [name for name, weight in weights.items() if weight <= 0]
    if absent:
        raise ValueError(
            f"Every domain needs a weight above zero in the reference run; {run} has none for "
            f"{', '.join(absent)}. Leave it out of domains in both runs, or train another "
            "reference."
        )


def _sha256(folder: Path) -> str:
    """Of the model's weights, all files of them."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _start(reference: Reference, corpus: Corpus, rule: WeightUpdate) -> DomainWeights:
    """Before the first step: the reference's weights, and an excess that no batch has shown yet.

    log V, the loss of a model that knows nothing, is what the code of DoReMi's authors begins
    with; DoGE's begins with none.
    """
    alpha_K = torch.tensor([reference.weights[name] for name in corpus.names], dtype=torch.float64)
    alpha_K = alpha_K / alpha_K.sum()
    unseen = math.log(corpus.vocab_size) if rule.variant == "doremi" else 0.0
    return DomainWeights(
        alpha=alpha_K,
        alpha_mean=alpha_K,
        excess=torch.full_like(alpha_K, unseen),
        num_steps=torch.zeros((), dtype=torch.float64),
    )


def _batches(
    config: DoReMiConfig, corpus: Corpus, reference: Reference, start_step: int
) -> BaseBatches:
    return BaseBatches(
        corpus,
        weights=reference.weights,
        batch_size=config.batch_size,
        seed=config.training.seed,
        start_step=start_step,
        domain_ids=True,
    )


def _first_line(reference: Reference) -> dict[str, Any]:
    """Before the first step the weights are the reference's, and so is their average."""
    return {"alpha": reference.weights, "alpha_mean": reference.weights}


def _measure(batches: BaseBatches, trainer: DoReMiTrainer, step: int) -> dict[str, Any]:
    """What a step leaves in the records; losses are null for a domain not in its batch."""
    names, weights = batches.corpus.names, trainer.weights
    drawn = zip(names, batches.mixture.drawn(step).tolist(), strict=True)
    return {
        "loss": ByName(names, trainer.domain_losses),
        "reference_loss": ByName(names, trainer.reference_losses),
        "excess": ByName(names, weights.excess),
        "alpha": ByName(names, weights.alpha),
        "alpha_mean": ByName(names, weights.alpha_mean),
        "tokens": {name: blocks * batches.corpus.block_size for name, blocks in drawn},
    }


def _weights_record(
    config: DoReMiConfig, corpus: Corpus, reference: Reference, trainer: DoReMiTrainer
) -> dict[str, Any]:
    average, last = (each.tolist() for each in (trainer.weights.alpha_mean, trainer.weights.alpha))
    prior = baselines.natural({name: corpus.train_tokens[name] for name in corpus.names})
    entries = [
        {
            "name": name,
            "weight": average[j],
            "weight_last": last[j],
            "reference_weight": reference.weights[name],
            "prior": prior[name],
            **corpus.sizes(name),
        }
        for j, name in enumerate(corpus.names)
    ]
    steps = config.training.steps
    model: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "method": "doremi",
        **trainer.rule._asdict(),
        "domains": entries,
        "model": config.model.model,
        "parameters": model.num_parameters(),
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "block_size": corpus.block_size,
        "batch_size": config.batch_size,
        "steps": steps,
        "tokens": steps * config.batch_size * corpus.block_size,
        "seed": config.training.seed,
        "drift": records.drift(config.out, dict(zip(corpus.names, average, strict=True))),
        "reference": reference.record,
        "versions": records.versions(),
    }
