"""What a user starts: `DoGETrainer` on packed tokens from a file, beside plain `Trainer`.

    python -m benchmarks.gpu.job doge tokens.pt --sequences 18

Needs torch, transformers and what `Trainer` needs, and nothing of the pipeline. The file has a
tensor of token ids below 50,304 for each domain, as `torch.save({"code": ..., "books": ...}, path)`
writes it.
Without one, tokens are drawn: seven domains, each with frequent words of its own, which come back.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.gpu.session import Row, Session, run_command
from doge_fast.alternation import synchronize

SIDES = ("plain", "doge")
# Of a command.
SECONDS = 200
# Of a domain: as many as plain training, which takes all of a step's at once, has room for.
SEQUENCES = (18, 9, 4, 2)
# Of plain training: bfloat16 logits, float32 ones and their gradient, and the activations of 82M.
BYTES_PER_TOKEN = 50_304 * 12 + 150_000
# Steps between two readings of the clock; before the second one memory is allocated and kernels are
# compiled.
EVERY = 5
# Blocks of a domain that are not trained on.
HELD_OUT = 8
DRAWN_DOMAINS, DRAWN_TOKENS = 7, 500_000


def job(session: Session) -> Iterator[Row]:
    """A row of plain training on the domains at equal shares, and one of DoGE over it."""
    if missing := _missing():
        yield {"skipped": f"Trainer needs more packages: {missing}"}
        return
    with tempfile.TemporaryDirectory() as folder:
        path = session.tokens or Path(folder) / "drawn.pt"
        if session.tokens is None:
            draw(path, DRAWN_TOKENS // (50 if session.quick else 1))
        num_domains = len(torch.load(path))
        # Once: what is free may change, and both sides take as many.
        sequences = sequences_of(session, num_domains)
        done: dict[str, Row] = {}
        for index, side in enumerate(SIDES):
            seconds = session.seconds_for(len(SIDES) - index, SECONDS)
            words = [side, str(path), f"--sequences={sequences}", f"--device={session.device}"]
            done[side] = run(words + ["--quick"] * session.quick, seconds)
            if side == "doge" and all("step_ms" in row for row in done.values()):
                done[side]["ratio"] = round(done[side]["step_ms"] / done["plain"]["step_ms"], 4)
            yield done[side]


def _missing() -> str | None:
    """Why Trainer cannot be used; None where it can."""
    program = "from doge_fast.integrations.transformers import DoGETrainer; import accelerate"
    code, printed = run_command([sys.executable, "-c", program], SECONDS)
    return None if code == 0 else printed.strip().splitlines()[-1]


def sequences_of(session: Session, num_domains: int) -> int:
    """Of each domain in a step."""
    if session.quick:
        return 1
    room = 0.8 * session.free_bytes() / (num_domains * models.SEQUENCE * BYTES_PER_TOKEN)
    return next((each for each in SEQUENCES if each <= room), SEQUENCES[-1])


def run(words: list[str], seconds: float) -> Row:
    """One command; right if it ends well, its losses are numbers and its weights sum to one."""
    row: Row = {"run": words[0], "command": " ".join(["python -m benchmarks.gpu.job", *words])}
    code, printed = run_command([sys.executable, "-m", "benchmarks.gpu.job", *words], seconds)
    if code is None:
        # Slow is not wrong.
        return row | {"skipped": printed}
    lines = printed.strip().splitlines()
    if code == 0:
        return row | json.loads(lines[-1])
    if re.search("(not enough|out of) memory", printed):
        return row | {"skipped": "out of memory"}
    return row | {"correct": False, "problem": f"code {code}", "lines": lines[-6:]}


def draw(path: Path, num_tokens: int) -> None:
    """Write domains of words by Zipf's law; half of them repeat the word of seven places before."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.arange(1, 50_258, dtype=torch.float64) ** -1.2
    found = {}
    for domain in range(DRAWN_DOMAINS):
        ranks = torch.multinomial(shares, num_tokens, replacement=True, generator=generator)
        words = torch.randperm(50_257, generator=generator)[ranks]
        for place in range(1, 1 + domain):
            again = torch.rand(num_tokens - 7 * place, generator=generator) < 0.5
            words[7 * place :][again] = words[: -7 * place][again]
        found[f"domain{domain}"] = words
    torch.save(found, path)


class Blocks(torch.utils.data.Dataset[Row]):
    """Blocks of a domain's tokens."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        num_blocks = len(tokens) // length
        self.blocks = tokens[: num_blocks * length].view(num_blocks, length).long()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def train(side: str, path: Path, sequences: int, device: torch.device, *, quick: bool) -> Row:
    """Train one side; what a row says of it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback
    from transformers import TrainingArguments as Arguments

    from doge_fast.integrations.transformers import DoGETrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        """Reads the clock when the device is idle."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """After a step."""
            if state.global_step % EVERY == 0:
                synchronize(device)
                times.append(time.perf_counter())

    shape = models.Shape(1, 2, 32, 50_304, 32) if quick else models.PAPER["82M"]
    domains = {name: Blocks(each, shape.sequence) for name, each in torch.load(path).items()}
    parts = {
        name: (
            torch.utils.data.Subset(each, range(HELD_OUT, len(each))),
            each.blocks[:HELD_OUT].to(device),
        )
        for name, each in domains.items()
    }
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.sequence,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    on_gpu = device.type == "cuda"
    is_doge = side == "doge"
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = Arguments(
            output_dir=folder,
            per_device_train_batch_size=sequences * (1 if is_doge else len(parts)),
            max_steps=3 * EVERY if quick else 12 * EVERY,
            learning_rate=5e-4,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_nan_inf_filter=False,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        train_parts = {name: part for name, (part, _) in parts.items()}
        options: Row = {"model": model, "args": arguments, "callbacks": [Clock()]}
        if is_doge:
            options |= {"train_dataset": train_parts, "domains": [*parts], "mu": 0.05}
            trainer: Any = DoGETrainer(**options)
        else:
            whole = torch.utils.data.ConcatDataset(train_parts.values())
            trainer = Trainer(**options, train_dataset=whole)
        trainer.train()
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, on_gpu):
        losses = [float(model(held, labels=held).loss) for _, held in parts.values()]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times)) / EVERY
    num_tokens = sequences * len(parts) * shape.sequence
    row: Row = {
        "step_ms": round(1e3 * step_s, 2),
        "tokens_per_s": round(num_tokens / step_s),
        "held_out_loss": round(statistics.mean(losses), 4),
        "correct": all(map(math.isfinite, losses)),
    }
    if is_doge:
        row["weights"] = {name: round(value, 6) for name, value in trainer.weights.items()}
        row["correct"] &= math.isclose(sum(row["weights"].values()), 1, rel_tol=1e-5)
    return row | ({"peak_bytes": torch.cuda.max_memory_allocated(device)} if on_gpu else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the row in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("tokens", type=Path, help="a .pt with a tensor for each domain")
    parser.add_argument("--sequences", type=int, default=SEQUENCES[0], help="of a domain in a step")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    args = parser.parse_args(arguments)
    row = train(args.side, args.tokens, args.sequences, args.device, quick=args.quick)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
