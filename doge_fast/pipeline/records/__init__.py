# ruff: noqa: F401
# mypy: implicit-reexport
"""What a run leaves on disk, and what is believed when it is read back.

A run directory is complete enough to be reported without the code that made it:

    config.json      what was asked, of which corpus, with which versions
    metrics.jsonl    one object a line, {"step", "kind": "train" | "eval", ...}; only appended to
    weights.json     the domain weights, keyed by name (learned, or what a base run used)
    evaluation.json  loss and perplexity per domain on held-out blocks
    fewshot.json     k-shot accuracies of lm-eval's tasks, with standard errors and chance

Whole files are written beside and renamed; a line is one write. So a run killed at any
moment leaves complete files and at most one torn line, which the next run drops. JSON has
no word for NaN and infinity: in metrics they become null, in weights they are an error.
"""

from doge_fast.pipeline.records.measures import (
    evaluation,
    few_shot,
    read_evaluation,
    read_experiment,
    read_few_shot,
    write_experiment,
)
from doge_fast.pipeline.records.metrics import (
    append_metrics,
    read_metrics,
    resume_metrics,
)
from doge_fast.pipeline.records.runs import (
    CONFIG,
    EVALUATION,
    EXPERIMENT,
    FEWSHOT,
    METRICS,
    QUEUE,
    WEIGHTS,
    Json,
    Stage,
    check_corpus,
    check_run,
    open_run,
    read_config,
    read_json,
    versions,
)
from doge_fast.pipeline.records.weights import (
    check_out,
    read_named,
    read_weights,
    weights_by_name,
    write_weights,
    writing,
)
from doge_fast.weights_file import SCHEMA_VERSION, plain, write_json
