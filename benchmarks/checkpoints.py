"""What it costs that a checkpoint survives: seconds to keep and hash the files of one model.

    python -m benchmarks.checkpoints --parameters 124e6 --folder runs

A model's float32 weights and AdamW's two moments are written as a stage writes them; the times are
medians. Run it where the checkpoints will lie: most of what is measured is the disk.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from doge_fast.pipeline.records import read_manifest, write_manifest


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=124_000_000)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    times = measured(args.parameters, args.folder, args.repeats)
    print(f"{args.parameters:,} parameters, {12 * args.parameters / 1e9:.2f} GB of files")
    for what, (seconds, busy) in times.items():
        print(f"{what:60} {seconds:7.2f} s, a CPU busy for {busy:.2f} s")


def measured(parameters: int, folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """{what: medians of its seconds, and of those in which a CPU was busy}."""
    weights = torch.randn(parameters)
    parts: dict[str, Callable[[Path], object]] = {
        "write the files, as before": lambda checkpoint: _write(checkpoint, weights),
        "have them on the disk, and hash them (manifest.json)": write_manifest,
        "hash them, where they are on the disk already": write_manifest,
        "check them, when a run is resumed": read_manifest,
    }
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in parts}
    for _ in range(repeats):
        checkpoint = Path(tempfile.mkdtemp(dir=folder, prefix="checkpoint-"))
        try:
            for what, part in parts.items():
                start, busy = time.perf_counter(), time.process_time()
                part(checkpoint)
                times[what].append((time.perf_counter() - start, time.process_time() - busy))
        finally:
            shutil.rmtree(checkpoint)
    return {
        what: (statistics.median(walls), statistics.median(cpus))
        for what, (walls, cpus) in ((what, zip(*each, strict=True)) for what, each in times.items())
    }


def _write(folder: Path, weights: torch.Tensor) -> None:
    save_file({"weights": weights}, folder / "model.safetensors")
    torch.save({"exp_avg": weights, "exp_avg_sq": weights.clone()}, folder / "optimizer.pt")


if __name__ == "__main__":
    main()
