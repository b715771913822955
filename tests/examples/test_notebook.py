"""The notebook is the page, and its cells run from top to bottom."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

NOTEBOOK = ROOT / "examples/weights.ipynb"


def code_cells() -> list[str]:
    """What the notebook runs."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_extensions"))
    import notebook

    page = notebook.PAGE.read_text(encoding="utf-8")
    # Else: python docs/_extensions/notebook.py
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook.notebook(page)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_thread")
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    install, *cells = code_cells()
    assert "%pip install" in install
    shown = []
    for cell in cells:
        tree = ast.parse(cell)
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last := tree.body[-1], ast.Expr) and isinstance(last.value, ast.Name):
            shown.append(names[last.value.id])
    (run,) = shown
    page = run._repr_html_()
    assert all(name in page for name in run.weights)
    assert page.count("<svg") == 2
    assert sum(run.weights.values()) == pytest.approx(1)
    assert Path("weights-steps.svg").read_text(encoding="utf-8").count("<svg") == 1
    assert str(run) == "Run('runs/proxy': doge, target universal, 20 steps, seed 0)"
    assert (run.path / "weights.json").samefile(Path(run) / "weights.json")
    assert run.metrics("eval")
