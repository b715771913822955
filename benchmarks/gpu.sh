#!/usr/bin/env bash
# Everything to know about the library on this machine's GPU, in under eight minutes; see gpu.py.
# Needs a Python with torch >= 2.11 and einops: PYTHON=..., .venv, or python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m benchmarks.gpu "$@"
