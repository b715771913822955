"""Makes examples/weights.ipynb of docs/how-to/python.md: `python docs/_extensions/notebook.py`."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/python.md"
NOTEBOOK = ROOT / "examples/weights.ipynb"

_CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_INSTALL = """\
# Where there is no doge_fast yet, as in Colab. Until there is a release, put the address of the
# repository, or the wheel that `make release` builds, in the place of the name.
import importlib.util

if importlib.util.find_spec("doge_fast") is None:
    %pip install --quiet "doge-fast[pipeline]"
"""


def cells(page: str) -> list[tuple[str, str]]:
    """(kind, text) of every cell: the prose of a page without its links, and its code."""
    parts = _CODE.split(page)
    found = [("markdown", _LINK.sub(r"\1", part).strip()) for part in parts[::2]]
    mixed = [*zip(found, (("code", part.strip()) for part in parts[1::2]), strict=False)]
    in_order = [cell for pair in mixed for cell in pair] + found[len(mixed) :]
    in_order.insert(1, ("code", _INSTALL.strip()))
    # A cell shows its last value: the run as a table and figures.
    return [
        (kind, text.replace("print(proxy.weights)", "proxy")) for kind, text in in_order if text
    ]


def notebook(page: str) -> str:
    """The notebook as its file has it."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
