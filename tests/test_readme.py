"""Every Python example of the README, and every docstring example, executed; docs: test_docs."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import sys

import pytest
import torch

import doge_fast
from tests.pages import ROOT, blocks_of
from tests.processes import ended, printed_by, shell_script


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
)
def test_links_of_pages_outside_of_docs_lead_somewhere(page):
    path = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    for link in links:
        assert link.startswith("https://") or (path.parent / link).exists(), link


def test_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {doge_fast.__version__}\n" in citation
    assert f'\nversion = "{doge_fast.__version__}"\n' in (ROOT / "pyproject.toml").read_text(
        "utf-8"
    )


def test_examples_of_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(ROOT / "README.md"):
        if block.language == "python":
            # The file name makes a traceback say which block failed.
            exec(compile(block.text, f"README.md, line {block.line}", "exec"), namespace)
    weights = namespace["optimizer"].weights
    assert sum(weights.values()) == pytest.approx(1)
    # The domain with the large gradients is the difficult one, and gets the most.
    assert max(weights, key=weights.get) == "code"


def test_contributing_draws_every_part_of_the_package():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = {module.name for module in pkgutil.iter_modules(doge_fast.__path__)}
    assert [name for name in parts if not re.search(rf"\b{name}(\.py|/)", page)] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not there")
@pytest.mark.parametrize(("chosen", "used"), [(None, "/.venv/cache"), ("/own", "/own")])
def test_make_has_a_cache_where_the_home_cannot_be_written(chosen, used, tmp_path):
    (tmp_path / "show.mk").write_text("show:\n\t@echo $$XDG_CACHE_HOME\n", encoding="utf-8")
    told = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "none")}
    told |= {} if chosen is None else {"XDG_CACHE_HOME": chosen}
    make = ["make", "-f", str(ROOT / "Makefile"), "-f", "show.mk", "show"]
    assert printed_by(*make, cwd=tmp_path, env=told).strip().endswith(used)
    home = told | {"HOME": str(tmp_path)}
    assert printed_by(*make, cwd=tmp_path, env=home).strip() == (chosen or "")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not there")
def test_make_keeps_no_half_of_an_environment(tmp_path):
    """As on a Debian without python3-venv: an environment with Python is made, and none of pip."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    half = f'"{sys.executable}" -m venv --without-pip .venv'
    shell_script(tmp_path / "python3", f'[ "$1" = -c ] || ! {half}')
    make = ["make", ".venv/bin/python", "PYTHON=./python3"]
    for _ in range(2):
        made = ended(*make, cwd=tmp_path)
        assert made.returncode != 0
        assert "./python3 -m venv .venv" in made.stdout


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages(doge_fast.__path__, "doge_fast.")]
)
def test_docstring_examples_run(name):
    if name.endswith("__main__") or "triton" in name:
        pytest.skip("importing it runs a program or needs triton")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_pipeline_reads_weights_of_the_page_and_of_the_optimizer(tmp_path):
    from doge_fast.pipeline import records

    blocks = blocks_of(ROOT / "docs" / "weights.md")
    (block,) = (block.text for block in blocks if block.language == "json")
    (tmp_path / "page.json").write_text(block, encoding="utf-8")
    read = records.read_weights(tmp_path / "page.json", domains=["book", "arxiv"])
    assert records.weights_by_name(read) == {"book": 0.6, "arxiv": 0.4}

    weight = torch.ones(2, requires_grad=True)
    optimizer = doge_fast.DoGEOptimizer(torch.optim.SGD([weight], lr=0.1), domains=["a", "b"])
    optimizer.save_weights(tmp_path / "ours.json")
    read = records.read_weights(tmp_path / "ours.json", domains=["a", "b"])
    assert records.weights_by_name(read) == {"a": 0.5, "b": 0.5}
