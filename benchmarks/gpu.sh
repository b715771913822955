#!/usr/bin/env bash
# Everything to know about the library on this machine's GPU; see benchmarks/gpu/__main__.py.
#   benchmarks/gpu.sh                 correctness, anchor, operators, profile, job: twelve minutes
#   benchmarks/gpu.sh PART ...        these, or steps, sizes, racecheck, ranks: at most 8 minutes each
#   --commit COMMIT                   where the checkout has no git
#   --out FOLDER                      where record and table go
#   --tokens FILE                     what the job trains on: a .pt with a tensor of tokens for each domain
#   --device cpu --quick              the same on tiny problems, without a GPU
# Needs a Python with torch >= 2.11, numpy, triton and einops: PYTHON=..., .venv, or python3.
set -euo pipefail
# Paths among the arguments are meant from where the caller is.
CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x "$CHECKOUT/.venv/bin/python" ]] && PYTHON="$CHECKOUT/.venv/bin/python"
fi
# -P: no benchmarks/ of the folder where the caller stands.
PYTHONPATH="$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -P -m benchmarks.gpu "$@"
