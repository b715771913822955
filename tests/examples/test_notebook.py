"""The notebook is the page, and its cells run from top to bottom."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.pages import ROOT

NOTEBOOK = ROOT / "examples/weights.ipynb"


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What makes the notebook."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/_extensions"))
    return importlib.import_module("notebook")


def execute(cell: str, names: dict[str, Any]) -> ast.stmt:
    """Runs a cell; `typed` of the names gets the commands, lines with a %. Its last statement."""
    tree = ast.parse(re.sub(r"%(pip .+)", lambda line: f"typed({line[1]!r})", cell))
    exec(compile(tree, "cell", "exec"), names)
    return tree.body[-1]


def test_notebook_is_made_of_its_page(maker):
    page = maker.PAGE.read_text(encoding="utf-8")
    # Else: make notebook
    assert NOTEBOOK.read_text(encoding="utf-8") == maker.notebook(page, maker.address())


def test_first_cell_installs_on_colab_alone(maker, monkeypatch):
    ((_, cell),) = maker.cells("", "https://github.com/OWNER/NAME")
    typed: list[str] = []
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    execute(cell, {"typed": typed.append})
    monkeypatch.setitem(sys.modules, "doge_fast", None)
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, "google.colab")
        execute(cell, {"typed": typed.append})
    assert typed == []
    execute(cell, {"typed": typed.append})
    (command,) = typed
    assert command.endswith('"doge-fast[pipeline] @ git+https://github.com/OWNER/NAME"')


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_thread")
def test_cells_run_and_draw_the_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        last = execute("".join(cell["source"]), names)
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Name):
            shown.append(names[last.value.id])
    (run,) = shown
    page = run._repr_html_()
    assert all(name in page for name in run.weights)
    assert page.count("<svg") == 2
    assert sum(run.weights.values()) == pytest.approx(1)
    assert Path("weights-1.svg").read_text(encoding="utf-8").count("<svg") == 1
    assert str(run) == "Run('runs/proxy': proxy, target universal, 20 steps, seed 0)"
    assert (run.path / "weights.json").samefile(Path(run) / "weights.json")
    assert run.metrics("eval")
