"""What a user starts: `doge-fast proxy` on text beside plain training, and `doge-fast profile`."""

import itertools
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import steps
from benchmarks.gpu.session import Row, Session, run_command

# `doge-fast`, which says in its last line how much of a GPU's memory it took.
PROGRAM = """
import atexit, sys, torch, doge_fast.cli
atexit.register(lambda: print(f"peak: {torch.cuda.max_memory_allocated()} bytes"))
sys.exit(doge_fast.cli.main())
"""
# What the commands import; a checkout with torch alone trains no language model.
NEEDED = "import doge_fast.cli, doge_fast.profiling.profile, doge_fast.pipeline.proxy"
# Of a command: text is read and packed once, then some steps are taken.
SECONDS = 200
# Lines of steps that are left out: memory is allocated and kernels are compiled.
WARM_UP_LINES = 1
# Of a domain: as many as plain training, which takes all of a step's at once, has room for.
SEQUENCES = (18, 9, 4, 2)
# Of plain training: bfloat16 logits, float32 ones and their gradient, and the activations of 82M.
BYTES_PER_TOKEN = 50_304 * 12 + 150_000


def job(session: Session) -> Iterator[Row]:
    """A row of plain training at uniform weights, and one of the proxy over it."""
    corpus = session.corpus
    if not corpus.is_dir():
        yield {"skipped": f"no corpus at {corpus}; --corpus names another place"}
        return
    if missing := _missing():
        yield {"skipped": f"the pipeline needs more packages: {missing}"}
        return
    domains = sorted(path.stem for path in corpus.iterdir() if not path.name.startswith("."))
    with tempfile.TemporaryDirectory() as folder:
        # Once: what is free may change, and both sides take as many.
        sequences = sequences_of(session, len(domains))
        plain = run("base", session, corpus, len(domains), sequences, Path(folder))
        yield plain
        doge = run("proxy", session, corpus, len(domains), sequences, Path(folder))
        if "step_ms" in plain and "step_ms" in doge:
            doge["ratio"] = round(doge["step_ms"] / plain["step_ms"], 4)
        yield doge


def _missing() -> str | None:
    """Why the pipeline cannot be imported; None where it can."""
    code, printed = run_command([sys.executable, "-c", NEEDED], SECONDS)
    return None if code == 0 else printed.strip().splitlines()[-1]


def sequences_of(session: Session, num_domains: int) -> int:
    """Of each domain in a step."""
    if session.quick:
        return 1
    room = 0.8 * session.free_bytes() / (num_domains * 512 * BYTES_PER_TOKEN)
    return next((each for each in SEQUENCES if each <= room), SEQUENCES[-1])


def command(
    stage: str, session: Session, corpus: Path, num_domains: int, sequences: int, out: Path
) -> list[str]:
    """Of a stage: 82M on blocks of 512 tokens; tiny where it is only tried out."""
    words: dict[str, object] = {
        "data": corpus,
        "model": "tiny" if session.quick else "82M",
        "block-size": 32 if session.quick else 512,
        "steps": 4 if session.quick else 60,
        "log-every": 1 if session.quick else 10,
        "eval-blocks": 8,
        "save-every": 0,
        "device": session.device.type,
        "dtype": "bfloat16" if session.on_gpu else "float32",
        "out": out,
    }
    tokenizer = corpus.parent / "tokenizers" / "gpt2"
    if session.quick:
        words |= {"max-tokens-per-domain": 20_000, "vocab-size": 512}
    elif tokenizer.is_dir():
        words["tokenizer"] = tokenizer
    if stage == "proxy":
        words["sequences-per-domain"] = sequences
    else:
        words |= {"weights": "uniform", "batch-size": sequences * num_domains}
    flags = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    return [sys.executable, "-c", PROGRAM, stage, *flags]


def run(
    stage: str, session: Session, corpus: Path, num_domains: int, sequences: int, folder: Path
) -> Row:
    """One command; right if it ends well, its losses are numbers and its weights sum to one."""
    out = folder / stage
    words = command(stage, session, corpus, num_domains, sequences, out)
    # Of two commands that take about as long.
    seconds = session.seconds_for(2 if stage == "base" else 1, SECONDS)
    row = {"run": stage} | ended(words, seconds)
    if "correct" in row or "skipped" in row:
        return row
    del row["lines"]
    text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    step_seconds = [line["seconds"] for line in lines if "seconds" in line][WARM_UP_LINES:]
    (losses,) = [line["loss"] for line in lines if line["kind"] == "eval"][-1:]
    tokens = num_domains * sequences * (32 if session.quick else 512)
    step_s = statistics.median(step_seconds)
    row |= {
        "step_ms": round(1e3 * step_s, 2),
        "tokens_per_s": round(tokens / step_s),
        "held_out_loss": round(statistics.mean(losses.values()), 4),
        "correct": all(map(math.isfinite, losses.values())),
    }
    if stage == "proxy":
        row["weights"] = [line for line in lines if "alpha_mean" in line][-1]["alpha_mean"]
        row["correct"] &= math.isclose(sum(row["weights"].values()), 1, rel_tol=1e-6)
    return row


def ended(words: list[str], seconds: float) -> Row:
    """What there is to say of a command that has run; not whether it is right, if it ended well."""
    row: Row = {"command": " ".join(["doge-fast", *words[3:]])}
    code, printed = run_command(words, seconds)
    if code is None:
        # Slow is not wrong.
        return row | {"skipped": printed}
    lines = printed.strip().splitlines()
    if lines and (peak := re.fullmatch(r"peak: (\d+) bytes", lines[-1])):
        lines.pop()
        row |= {"peak_bytes": int(peak[1])} if int(peak[1]) else {}
    if code == 0:
        return row | {"lines": lines}
    row["lines"] = lines[-6:]
    if re.search("(not enough|out of) memory", printed):
        return row | {"skipped": "out of memory"}
    return row | {"correct": False, "problem": f"code {code}"}


def profiles(session: Session) -> Iterator[Row]:
    """What generalization estimation costs, phase by phase, over plain training."""
    if missing := _missing():
        yield {"skipped": f"the pipeline needs more packages: {missing}"}
        return
    for num_domains, mode in itertools.product((7,) if session.quick else (7, 22), steps.MODES):
        words: dict[str, object] = {"domains": num_domains, "mode": mode, "steps": 3}
        words |= {"sequences": 2, "device": session.device.type}
        if not session.quick:
            sequences = sequences_of(session, num_domains)
            words |= {"model": "82M", "sequence-length": 512, "sequences": sequences}
            words |= {"steps": 9, "dtype": "bfloat16"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            flags = [f"--{name}={value}" for name, value in words.items()]
            program = [sys.executable, "-c", PROGRAM, "profile", *flags, f"--json={path}"]
            row = ended(program, session.seconds_for(1, SECONDS))
            # The file goes, and with it what names it: the command's last word and its last line.
            row["command"] = row["command"].removesuffix(f" --json={path}")
            row |= {"domains": num_domains, "mode": mode}
            if "correct" not in row and "skipped" not in row:
                row |= {"lines": row["lines"][:-1], "correct": True}
                row["profile"] = json.loads(path.read_text(encoding="utf-8"))
        yield row
