"""The documentation: every block of every page is run, the site builds, and it names everything."""

import io
import os
import pkgutil
import re
import shlex
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import doge_fast
from benchmarks.models import PAPER, num_parameters
from doge_fast import cli
from tests import scale
from tests.grids import grid
from tests.pages import ROOT, Reader, blocks_of
from tests.pipeline.corpora import texts, write_jsonl
from tests.pipeline.task_documents import write_documents

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]

# The parts of the report, which are nobody's to call.
UNDOCUMENTED = re.compile(r"doge_fast\.(__main__|_\w+(\..*)?|pipeline\.reporting(\..*)?)")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has after the tutorial, small: a corpus of its domains; and a task."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("code", "docstrings", "manual"):
        write_jsonl(folder / "corpus" / f"{name}.jsonl", texts(name, 200))
    (folder / "tasks").mkdir()
    write_documents(folder / "tasks", "logiqa", train=200, scored=200)
    # A shard as WebOrganizer's corpus has it: two topics, and two formats of each.
    shard, numbers = "CC_shard_00000000_processed", np.arange(200)
    rows = folder / "Corpus-200B" / "documents" / f"{shard}.jsonl.zst"
    write_jsonl(rows, texts("code", len(numbers)))
    for name, domains in (("topics", numbers % 2), ("formats", numbers // 2 % 2)):
        file = folder / "Corpus-200B" / f"domains_{name}" / f"{shard}__choice.npy"
        file.parent.mkdir()
        np.save(file, domains)
    return folder


# torch's compiler warns of itself.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:.*torch.jit.script_method:DeprecationWarning",
)
@pytest.mark.parametrize(
    "page",
    # The tutorial is a whole study; the others take more than four seconds.
    grid(PAGES, some=lambda page: page.stem not in ("tutorial", "faq", "python", "compile")),
    ids=lambda page: page.relative_to(DOCS).as_posix(),
)
def test_blocks_of_every_page_run(page, workplace, tmp_path, tmp_path_factory, monkeypatch):
    if not any(block.language != "none" for block in blocks_of(page)):
        pytest.skip("nothing to run on this page")
    if page.stem == "compile" and shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler, which torch.compile needs on a CPU")
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Reader(page, tmp_path_factory.getbasetemp() / "blocks").read()


# The compiler's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.exhaustive
def test_page_of_compiling_makes_the_graphs_that_it_names(tmp_path, monkeypatch):
    """To the number, without inductor, which only makes kernels of the graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    page = DOCS / "how-to" / "compile.md"
    reader = Reader(page, tmp_path)
    for block in blocks_of(page):
        if block.language == "text":
            assert reader.printed == block.text
        reader._read(block, page.name)
    # Beside the three that the page shows, one of the body with another optimizer, one of its step.
    assert counters["stats"]["unique_graphs"] == 5
    # At the scheduler's patch of the step, and where the wrapped optimizer's step begins.
    assert sum(counters["graph_break"].values()) == 2


def test_commands_of_readme_parse():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("doge-fast ")]
    assert commands
    for command in commands:
        assert cli.parse(shlex.split(command, comments=True)[1:]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint('three domains')\n```\n\n```text\ntwo domains\n```\n",
        "```bash\nrm -rf everything\n```\n",
        "<!-- test: parse -->\n```bash\ndoge-fast proxy --no-such-option 1\n```\n",
    ],
    ids=["print", "command", "option"],
)
def test_page_that_shows_something_else_is_noticed(text, tmp_path):
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        Reader(tmp_path / "page.md", tmp_path).read()


def test_page_of_examples_has_every_example():
    shown = (DOCS / "how-to" / "examples.md").read_text("utf-8")
    there = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert there == set(re.findall(r"\.\./\.\./examples/(\w+\.\w+)", shown))


def test_reference_has_every_public_module():
    """A module that a page names is written out in full, for all in it has docstrings."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^\.\. automodule:: (\S+)$", pages, re.M)
    public = {
        module.name
        for module in pkgutil.walk_packages(doge_fast.__path__, "doge_fast.")
        if not module.ispkg and not UNDOCUMENTED.fullmatch(module.name)
    }
    assert public - set(named) == set(), "add them to a page in docs/reference"
    assert set(named) - public == set(), "they are gone"


def test_page_of_scale_shows_what_the_formulas_give():
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| \d", line)]
    assert rows
    num_params = num_parameters(PAPER["684M"])
    for cells in rows:
        num_ranks, num_rows = int(cells[0]), int(cells[1])
        waiting = scale.FLOAT32 * num_params
        gram = scale.gathered_gram_bytes(num_rows, num_ranks)
        own = scale.most_rows(num_rows, num_ranks)
        memory = sum(scale.training_bytes(num_params).values()) + waiting + gram
        memory += scale.rows_bytes(num_params, own, 4)
        memory += scale.exchanged_bytes(num_params, num_rows, num_ranks, 4)
        sent = scale.data_parallel_bytes(num_params, num_rows, num_ranks, 4)
        assert cells[2].strip() == f"{memory / 1e9:.1f}"
        if num_ranks == 1:
            continue
        assert cells[3].strip() == _sent(sent, scale.ddp_bytes(num_params, num_ranks))
        shards = sum(scale.training_bytes(num_params, num_ranks).values()) + waiting / num_ranks
        # The parameters of all shards are kept between domains.
        shards += scale.FLOAT32 * num_params + gram
        shards += scale.rows_bytes(num_params, num_rows, 4) / num_ranks
        sent = scale.sharded_bytes(num_params, num_rows, num_ranks, num_rows, are_kept=True)
        plain = scale.sharded_bytes(num_params, 0, num_ranks, 1, are_kept=False)
        assert cells[4].strip() == f"{shards / 1e9:.1f}"
        assert cells[5].strip() == _sent(sent, plain)


def _sent(num_bytes: float, plain: float) -> str:
    return f"{num_bytes / 1e9:.1f} ({num_bytes / plain:.2f})"


@pytest.mark.exhaustive
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    """Built in this process, which has imported most of what is documented.

    A warning of the generator is an error, of a link that leads nowhere too.
    """
    pytest.importorskip("sphinx", reason="the generator of the documentation is not installed")
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError

    site, said = tmp_path / "site", io.StringIO()
    with warnings.catch_warnings():
        # Python's warnings of the generator's own packages; its warnings on our pages count.
        warnings.simplefilter("ignore")
        app = Sphinx(
            *(DOCS, DOCS, site, site / ".doctrees", "html"),
            status=None,
            warning=said,
            warningiserror=True,
        )
        try:
            app.build()
        except SphinxError as error:
            said.write(str(error))
    assert app.statuscode == 0, said.getvalue()
    assert not said.getvalue()
    # Nothing that a browser loads by itself comes from elsewhere.
    for page in site.rglob("*.html"):
        source = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"([^\"]+)\"", source)
        assert not [each for each in loaded if each.startswith(("http:", "https:", "//"))], page
    for sheet in (site / "_static").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet
