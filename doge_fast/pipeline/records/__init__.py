# ruff: noqa: F403
"""What a run leaves on disk: how it is written, and how it is checked when it is read.

A run directory is complete enough to be reported without the code that made it:

    config.json      the settings, the corpus, the versions of packages
    metrics.jsonl    one object a line, {"step", "kind": "train" | "eval", ...}; only appended to
    weights.json     the domain weights, keyed by name (learned, or what a base run used)
    evaluation.json  loss and perplexity per domain on held-out blocks
    fewshot.json     k-shot accuracies of lm-eval's tasks, with standard errors and chance
    model/           what was trained, with manifest.json: names, sizes and digests of its files
    checkpoints/     while it trains, two generations of all that it takes to go on

Whole files are written beside and renamed; a line is one write. So a run killed at any
moment leaves complete files and at most one torn line, which the next run drops. JSON has
no word for NaN and infinity: in metrics they become null, in weights they are an error.
"""

from doge_fast.pipeline.records.folders import *
from doge_fast.pipeline.records.runs import *
from doge_fast.pipeline.records.schema import *
from doge_fast.pipeline.records.weights import *
from doge_fast.weights.weights_file import plain as plain
from doge_fast.weights.weights_file import write_json as write_json
