"""The step that a profile takes apart, plain or DoGE: what it runs, moves and keeps.

Both run the same model under AdamW on the same random tokens, and name their phases
(`doge_fast.tracing`).
"""

import logging
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from doge_fast.flat_buffer import FlatBuffer
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.pipeline import memory
from doge_fast.pipeline.config import ModelConfig, ProfileConfig
from doge_fast.pipeline.model import build_model, load_architecture
from doge_fast.pipeline.roofline import Bandwidth
from doge_fast.pipeline.sizes import SIZES
from doge_fast.tracing import phase

_log = logging.getLogger(__name__)

WARM_UP = 2
# Those of the family that are made for CPUs.
SMALL_VOCABULARY, PAPER_VOCABULARY = 4096, 50_304
SMALL = ("tiny", "mini", "small")


class Traffic(NamedTuple):
    """Bytes that must be read and written."""

    read: int
    written: int

    def seconds(self, limits: Bandwidth) -> float:
        """The time this takes at the measured limits; what is read beside a write is a copy."""
        copied = min(self.read, self.written)
        return float(2 * copied / limits.copy + (self.read - copied) / limits.read)


class ProfiledStep:
    """A step of AdamW alone, or of `DoGEOptimizer` around it; calling it runs one."""

    def __init__(self, config: ProfileConfig, *, is_doge: bool) -> None:
        self.config = config
        self.name = "doge" if is_doge else "plain"
        self.device = torch.device(config.device)
        self.is_stacked = config.mode == "stacked"
        # R: training domains and targets.
        self.num_rows = config.domains + config.targets
        torch.manual_seed(0)
        model: Any = build_model(
            ModelConfig(model=config.model),
            cast(Any, _Vocabulary(range(_vocab_size(config)))),
            block_size=config.sequence_length,
            on_size=lambda size: _check_memory(config, size, is_told=not is_doge),
        )
        # Dropout would draw numbers, other ones for each side.
        self.model = model.train(False).to(self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        parameters: Any = self.model.named_parameters()
        fused = self.device.type == "cuda" or None
        self.inner = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)
        # [R, sequences of a row, L], the same for both steps.
        shape = (self.num_rows, config.sequences, config.sequence_length)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        self.tokens = tokens.to(self.device)
        self.batches = [self.tokens.flatten(0, 1)] if self.is_stacked else list(self.tokens)
        self.optimizer = self._wrapped() if is_doge else None

    def _wrapped(self) -> DoGEOptimizer:
        config = self.config
        dtype = config.buffer_dtype
        return DoGEOptimizer(
            self.inner,
            domains=[f"domain {i}" for i in range(config.domains)],
            target={f"target {i}": 1.0 for i in range(config.targets)} or "universal",
            # Large: the weights stay near uniform, and the step costs the same.
            mu=1e6,
            buffer_dtype=None if dtype == "auto" else getattr(torch, dtype),
        )

    def __call__(self) -> None:
        """Run a step."""
        optimizer = self.optimizer
        if optimizer is None:
            for batch in self.batches:
                # The mean over all rows is learned from.
                self.learn(batch, self.num_rows)
            with phase("inner_step"):
                self.inner.step()
            self.inner.zero_grad()
            return
        if self.is_stacked:
            sizes = dict.fromkeys(optimizer.rows, self.config.sequences)
            with optimizer.stacked(self.model, sizes):
                self.learn(self.batches[0])
        else:
            for name, batch in zip(optimizer.rows, self.batches, strict=True):
                with optimizer.domain(name):
                    self.learn(batch)
        optimizer.step()
        optimizer.zero_grad()

    def learn(self, tokens: Tensor, num_losses: int = 1) -> None:
        """Forward and backward: the mean loss of a token, summed over a stacked batch's domains."""
        is_mixed = self.config.dtype == "bfloat16"
        with phase("forward"), torch.autocast(self.device.type, torch.bfloat16, is_mixed):
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            # One mean per domain; all have as many sequences.
            num_parts = self.num_rows if self.is_stacked else 1
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            loss = losses.view(num_parts, -1).mean(1).sum() / num_losses
        with phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    @property
    def buffer(self) -> FlatBuffer:
        """The rows of a DoGE step."""
        assert self.optimizer is not None
        return self.optimizer.buffer

    @property
    def extra_bytes(self) -> int:
        """What this step keeps and a plain one does not.

        Where one backward pass fills all rows, plain training has no gradient yet at its peak, and
        the combined one, which lasts from step to step, counts too.
        """
        rows = self.buffer.num_bytes
        is_one_pass = self.is_stacked or len(self.tokens) == 1
        return rows + is_one_pass * rows // self.buffer.num_rows

    def least_traffic(self) -> dict[str, Traffic]:
        """What each phase cannot avoid to move, activations left aside.

        Forward reads the parameters once per pass, backward reads them and writes a gradient;
        accumulation reads a gradient and writes a row (stacked, the backward pass writes it); the
        Gram matrix reads all rows once, the weighted sum those of the training domains; the wrapped
        optimizer reads gradient, parameter and state and writes the latter two.
        """
        R = self.num_rows
        once = sum(each.nbytes for each in self.parameters)
        rows = sum(block.rows_BN.nbytes for block in self.buffer.blocks)
        states = (value for of_param in self.inner.state.values() for value in of_param.values())
        state = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
        if self.is_stacked:
            forward = once
            backward, accumulate = Traffic(forward, rows), Traffic(0, 0)
        else:
            forward = once * R
            backward, accumulate = Traffic(forward, forward), Traffic(forward, rows)
        square = 8 * R**2
        return {
            "forward": Traffic(forward, 0),
            "backward": backward,
            "accumulate": accumulate,
            "gram": Traffic(rows, square),
            "reweight": Traffic(2 * square, square),
            "weighted_sum": Traffic(rows * (R - self.config.targets) // R, once),
            "inner_step": Traffic(2 * once + state, once + state),
        }


class _Vocabulary(list[int]):
    """As much of a tokenizer as a fresh model asks for."""

    eos_token_id = 0

    def get_vocab(self) -> dict[int, int]:
        """Every token is its number."""
        return dict(zip(self, self, strict=True))


def _check_memory(config: ProfileConfig, num_parameters: int, *, is_told: bool) -> None:
    """Say what the two steps will keep at least, and refuse what cannot fit."""
    if not is_told:
        return
    # Both models are there at once.
    parts = {name: 2 * size for name, size in memory.needed(num_parameters).items()}
    num_rows = config.targets + config.domains
    dtype = torch.float32 if config.buffer_dtype == "auto" else getattr(torch, config.buffer_dtype)
    parts[f"gradients of {num_rows} rows"] = num_rows * num_parameters * dtype.itemsize
    text = memory.size_text(sum(parts.values()))
    _log.info("profile: both steps keep %s, and activations", text)
    advice = "Take a smaller --model, fewer --domains, or --buffer-dtype bfloat16."
    memory.refuse_what_cannot_fit(parts, torch.device(config.device), advice=advice)


def _vocab_size(config: ProfileConfig) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    if config.model in SIZES:
        return SMALL_VOCABULARY if config.model in SMALL else PAPER_VOCABULARY
    return int(load_architecture(config.model).vocab_size)
