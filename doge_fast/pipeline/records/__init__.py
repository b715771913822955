# ruff: noqa: F401
# mypy: implicit-reexport
"""What a run leaves on disk, and what is believed when it is read back.

A run directory is complete enough to be reported without the code that made it:

    config.json      what was asked, of which corpus, with which versions
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

from doge_fast.pipeline.records.checkpoints import (
    alone,
    complete_checkpoint,
    newest_checkpoint,
    resume_checkpoint,
    step_of,
)
from doge_fast.pipeline.records.manifest import (
    MODEL,
    check_finished,
    check_model,
    is_finished,
    read_manifest,
    write_manifest,
)
from doge_fast.pipeline.records.runs import (
    CHECKPOINTS,
    METRICS,
    WEIGHTS,
    WRITING,
    Json,
    append_metrics,
    changed_domains,
    check_corpus,
    check_experiment,
    check_run,
    evaluation,
    few_shot,
    is_measured,
    keep_metrics,
    load,
    load_config,
    load_evaluation,
    open_run,
    read_config,
    read_evaluation,
    read_experiment,
    read_json,
    read_lines,
    read_metrics,
    resume_metrics,
    versions,
    write_experiment,
)
from doge_fast.pipeline.records.shapes import (
    CONFIG,
    EVALUATION,
    EXPERIMENT,
    FEWSHOT,
    MANIFEST,
    WAY_OUT,
    Stage,
    check_shape,
)
from doge_fast.pipeline.records.weights import (
    check_out,
    is_typed,
    read_weights,
    weights_by_name,
    write_weights,
)
from doge_fast.weights.weights_file import plain, write_json
