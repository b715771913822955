"""The import rule of the house, executed: an import goes strictly down the floors."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up; a name stands for a module or for all below a package.
FLOORS = [
    line.split()
    for line in """
    doge_fast._layout doge_fast.defaults doge_fast.simplex doge_fast.generalization \
        doge_fast.tracing doge_fast.alternation doge_fast.atomic_file doge_fast.projection \
        doge_fast.scale
    doge_fast.failures doge_fast.weights_file doge_fast.kernels doge_fast.wrapper \
        doge_fast.group_dro doge_fast.sampling doge_fast.distributed.wrappers
    doge_fast.flat_buffer doge_fast.parameters doge_fast.objective doge_fast.info
    doge_fast.layers.batch
    doge_fast.layers.by_slices doge_fast.layers.token_sums
    doge_fast.layers.rule
    doge_fast.layers.linear doge_fast.layers.embedding doge_fast.layers.stacked_layer
    doge_fast.layers.norms
    doge_fast.layers.registry
    doge_fast.example_norms
    doge_fast.reweighting doge_fast.subset doge_fast.cancellation doge_fast.exchange
    doge_fast.distributed.company
    doge_fast.distributed.rounds doge_fast.distributed.fragments
    doge_fast.distributed.data_parallel doge_fast.distributed.sharded
    doge_fast.distributed.sharded_step
    doge_fast.distributed.exchanges
    doge_fast.stacked doge_fast.combining doge_fast.entries
    doge_fast.step doge_fast.losses
    doge_fast.checkpoint
    doge_fast.optimizer doge_fast.reference
    doge_fast.mixture.permutation doge_fast.mixture.changes
    doge_fast.mixture.counts doge_fast.mixture.rows
    doge_fast.mixture.steering
    doge_fast.mixture.samplers doge_fast.mixture.state
    doge_fast.mixture.dataset
    doge_fast.integrations.dealing
    doge_fast.integrations.domain_data
    doge_fast.integrations.causal_lm
    doge_fast.integrations.domain_trainer
    doge_fast.integrations.transformers
    doge_fast.pipeline.config.ranges doge_fast.pipeline.ranks doge_fast.pipeline.named
    doge_fast.pipeline.config.stages doge_fast.pipeline.config.fields \
        doge_fast.pipeline.tables doge_fast.pipeline.progress \
        doge_fast.pipeline.sizes doge_fast.pipeline.memory
    doge_fast.pipeline.config
    doge_fast.pipeline.generated_corpus
    doge_fast.pipeline.experiments.presets doge_fast.pipeline.reporting.paper \
        doge_fast.pipeline.local_corpus doge_fast.pipeline.cache \
        doge_fast.pipeline.exports.text
    doge_fast.pipeline.corpus_files
    doge_fast.pipeline.sources
    doge_fast.pipeline.packing doge_fast.pipeline.records.shapes \
        doge_fast.pipeline.experiments.planner \
        doge_fast.pipeline.experiments.queue
    doge_fast.pipeline.records.runs
    doge_fast.pipeline.records.weights doge_fast.pipeline.records.metrics \
        doge_fast.pipeline.records.manifest
    doge_fast.pipeline.records.finished
    doge_fast.pipeline.experiments.known doge_fast.pipeline.model doge_fast.pipeline.domains \
        doge_fast.pipeline.records doge_fast.pipeline.baselines \
        doge_fast.pipeline.exports.blend
    EXPORT_FAMILIES
    doge_fast.pipeline.exports.registry doge_fast.pipeline.profile_steps
    doge_fast.pipeline.reporting.wording doge_fast.pipeline.swarm
    doge_fast.pipeline.reporting.mixtures doge_fast.pipeline.health
    doge_fast.pipeline.reporting.runs doge_fast.pipeline.reporting.plotting
    doge_fast.pipeline.reporting.statistics
    doge_fast.pipeline.reporting.proxies
    doge_fast.pipeline.reporting.study
    doge_fast.pipeline.training doge_fast.pipeline.trainer \
        doge_fast.pipeline.weights.summary doge_fast.pipeline.weights.warm_start \
        doge_fast.pipeline.reporting.parts \
        doge_fast.pipeline.reporting.background doge_fast.pipeline.reporting.figures
    doge_fast.pipeline.weights.pages
    doge_fast.pipeline.run doge_fast.pipeline.stage doge_fast.pipeline.weights.bounds
    doge_fast.pipeline.reporting.compared \
        doge_fast.pipeline.reporting.regret
    doge_fast.pipeline.reporting.findings
    STAGES
    doge_fast.pipeline.task_target doge_fast.pipeline.experiments.regret
    doge_fast.pipeline.experiments.plans
    doge_fast.pipeline.experiments.runner doge_fast.flags doge_fast.planning
    doge_fast.cli
    doge_fast.__main__
    """.replace(
        "EXPORT_FAMILIES",
        " ".join(
            f"doge_fast.pipeline.exports.{family}" for family in ("megatron", "configs", "loaders")
        ),
    )
    .replace(
        "STAGES",
        " ".join(
            f"doge_fast.pipeline.{stage}"
            for stage in (
                *("proxy", "base", "doremi", "selection", "rehearsal", "evaluation"),
                "fewshot",
                *("exports.command", "report", "profiling", "weights.verbs"),
            )
        ),
    )
    .strip()
    .splitlines()
]


def floor(module: str) -> int | None:
    """The floor of a module; None where it stands on none (package re-exports, torch, ...)."""
    for height, names in enumerate(FLOORS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return height
    return None


def modules() -> dict[str, Path]:
    """Every module of ours, by the name it is imported under."""
    found = {}
    for path in sorted((ROOT / "doge_fast").rglob("*.py")):
        if path.name != "__init__.py":
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        found["doge_fast." + ".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from doge_fast import simplex` names a module, `from x import name` may not.
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("doge_fast", "kernels")}


def test_every_module_stands_on_a_floor() -> None:
    homeless = [name for name in modules() if floor(name) is None]
    assert not homeless, f"{homeless} stand on no floor; add them to FLOORS"


@pytest.mark.parametrize("module", modules())
def test_no_arrow_points_up_or_sideways(module: str) -> None:
    height = floor(module)
    assert height is not None
    for imported in imports(modules()[module]):
        assert not imported.startswith("kernels"), f"{module} imports {imported} bare"
        other = floor(imported)
        if other is None:
            continue
        # The operators' folder is one floor of several files.
        is_kernels = module.startswith("doge_fast.kernels.") and imported.startswith(
            "doge_fast.kernels"
        )
        assert other < height or is_kernels, f"{module} must not import {imported}"


def test_contributing_draws_the_floors() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Floors\n")[2]
    heights = []
    for line in page.split("```")[1].splitlines():
        prefix = "doge_fast.pipeline." if line.startswith("pipeline") else "doge_fast."
        words = re.sub(r"^pipeline|\(.*\)", "", line).replace(",", " ").split()
        found = [height for word in words if (height := top(prefix + word)) is not None]
        heights += [max(found)] if found else []
    assert len(heights) > 20
    assert heights == sorted(set(heights), reverse=True)


def top(name: str) -> int | None:
    """The floor of a module; of a folder that of its highest file."""
    inside = [
        height
        for height, names in enumerate(FLOORS)
        if any(each == name or each.startswith(name + ".") for each in names)
    ]
    return max(inside, default=None)


# What a room may hold; methods and attributes are counted in the core.
MOST_LINES, MOST_FIELDS, MOST_METHODS, MOST_ATTRIBUTES = 450, 20, 30, 10


@pytest.mark.parametrize("module", modules())
def test_files_and_dataclasses_are_small(module: str) -> None:
    text = modules()[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.ClassDef):
            fields = [item for item in found.body if isinstance(item, ast.AnnAssign)]
            assert len(fields) <= MOST_FIELDS, f"{found.name} has {len(fields)} fields"


def core() -> dict[str, Path]:
    """The modules outside the pipeline and the command line."""
    return {
        name: path
        for name, path in modules().items()
        if not name.startswith(("doge_fast.pipeline", "doge_fast.cli"))
    }


@pytest.mark.parametrize("module", core())
def test_classes_of_the_core_are_small(module: str) -> None:
    text = core()[module].read_text(encoding="utf-8")
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.ClassDef):
            methods = [item for item in found.body if isinstance(item, ast.FunctionDef)]
            assert len(methods) <= MOST_METHODS, f"{found.name} has {len(methods)} methods"
            attributes = {
                node.attr
                for method in methods
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if isinstance(node.value, ast.Name) and node.value.id == "self"
            }
            assert len(attributes) <= MOST_ATTRIBUTES, f"{found.name} has {sorted(attributes)}"


def private_names(path: Path) -> set[str]:
    """Names with one leading underscore that a file defines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_module_reaches_into_another() -> None:
    """A private name is used in the file that defines it, and nowhere else."""
    defined = {name: private_names(path) for name, path in modules().items()}
    everywhere = set().union(*defined.values())
    for module, path in modules().items():
        used = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                used |= {alias.name for alias in node.names}
        foreign = (used & everywhere) - defined[module] - {"_layout"}
        assert not foreign, f"{module} uses {sorted(foreign)}, which other modules define"


def test_reference_imports_torch_only() -> None:
    path = ROOT / "doge_fast" / "reference.py"
    assert imports(path) == set()


def test_kernels_folder_is_no_package() -> None:
    """With an __init__.py it would shadow a public package of the same name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "doge_fast").exists()
