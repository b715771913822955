"""Proxy runs on the small real corpora: the weights they learn, and how long they take.

    python benchmarks/pipeline.py wiki40b-ca wiki40b-nl slimpajama --data ../shared/data

Each task is one `doge-fast proxy` command, printed and kept in its record under `results/`. A run
that is complete already is only read; times are sums over its steps, without reading the corpus.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import protocol
from doge_fast.pipeline import records

COMMON = "--model mini --steps 120 --learning-rate 1e-3 --min-learning-rate 2e-4 --mu 0.02"
WIKI40B = "--data {data}/mini_wiki40b --domains en de fr es ru"
TASKS = {
    "wiki40b-ca": f"{WIKI40B} --target ca --tokenizer {{data}}/tokenizers/wiki40b-ca {COMMON}",
    "wiki40b-nl": f"{WIKI40B} --target nl --tokenizer {{data}}/tokenizers/wiki40b-nl {COMMON}",
    "slimpajama": f"--data {{data}}/mini_slimpajama --tokenizer {{data}}/tokenizers/gpt2 {COMMON}",
}
RESULTS = Path(__file__).parent / "results"


def run(task: str, data: Path, out: Path) -> tuple[str, Path]:
    """Learn the weights of `task`, or find them learned; the command and its run directory."""
    directory = out / task
    arguments = TASKS[task].format(data=data)
    command = f"doge-fast proxy {arguments} --out {directory}"
    print(command, flush=True)
    subprocess.run([sys.executable, "-m", "doge_fast", *command.split()[1:]], check=True)
    return command, directory


def record(command: str, directory: Path) -> dict[str, Any]:
    """What is kept of a run."""
    train = records.read_metrics(directory, kind="train")
    held_out = records.read_metrics(directory, kind="eval")
    every = max(1, len(train) // 10)
    return {
        "benchmark": "pipeline",
        "command": command,
        **protocol.machine("cpu"),
        "seconds_in_steps": round(sum(line.get("seconds", 0.0) for line in train), 1),
        "skipped_steps": sum(bool(line.get("skipped")) for line in train),
        "corpus": records.read_config(directory)["corpus"],
        "weights": records.read_weights(directory),
        "held_out_loss": held_out[-1]["loss"],
        "alpha_mean": {line["step"]: line["alpha_mean"] for line in train[::every]},
    }


def main() -> None:
    """Run or read each task, print its weights, write its record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs go")
    args = parser.parse_args()
    for task in args.tasks:
        found = record(*run(task, args.data, args.out))
        protocol.write(RESULTS / f"proxy-{task}.json", found)
        weights = records.weights_by_name(found["weights"])
        print(f"{task}: " + ", ".join(f"{name} {weights[name]:.3f}" for name in weights))


if __name__ == "__main__":
    main()
