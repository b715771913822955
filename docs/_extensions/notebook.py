"""Makes examples/weights.ipynb of docs/how-to/python.md: `make notebook`. How Colab opens it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/python.md"
NOTEBOOK = ROOT / "examples/weights.ipynb"

_CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_INSTALL = """\
# A new machine of Colab has no doge_fast. Anywhere else this cell does nothing.
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("doge_fast") is None:
    %pip install --quiet "{}"
"""


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def address() -> str | None:
    """Where the repository is public, once a person has written it into pyproject.toml."""
    found: str | None = project().get("urls", {}).get("Repository")
    return found


def installed_from(address: str | None) -> str:
    """What pip is given on Colab: the repository, or a wheel that lies beside the notebook."""
    wheel = f"./doge_fast-{project()['version']}-py3-none-any.whl[pipeline]"
    return wheel if address is None else f"doge-fast[pipeline] @ git+{address}"


def on_colab(address: str | None) -> str:
    """How to open the notebook on Colab, which follows links to GitHub alone."""
    if address and address.startswith("https://github.com/"):
        repository = address.removeprefix("https://github.com/")
        place = f"{repository}/blob/main/{NOTEBOOK.relative_to(ROOT).as_posix()}"
        return f"[Open it in Colab](https://colab.research.google.com/github/{place})."
    upload = "" if address else ", and upload the wheel that `python -m build --wheel` makes"
    return f"In Colab open it with File, Upload notebook{upload}."


def cells(page: str, address: str | None) -> list[tuple[str, str]]:
    """(kind, text) of every cell: the prose of a page without its links, and its code."""
    parts = _CODE.split(page)
    found = [("markdown", _LINK.sub(r"\1", part).strip()) for part in parts[::2]]
    mixed = [*zip(found, (("code", part.strip()) for part in parts[1::2]), strict=False)]
    in_order = [cell for pair in mixed for cell in pair] + found[len(mixed) :]
    in_order.insert(1, ("code", _INSTALL.strip().format(installed_from(address))))
    # A cell shows its last value: the run as a table and figures.
    return [
        (kind, text.replace("print(proxy.weights)", "proxy")) for kind, text in in_order if text
    ]


def notebook(page: str, address: str | None) -> str:
    """The notebook as its file has it."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page, address)):
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
    NOTEBOOK.write_text(notebook(PAGE.read_text("utf-8"), address()), encoding="utf-8")
