"""The import rule of the house, executed: an import goes strictly down the floors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up; a name stands for a module or for all below a package.
FLOORS = [
    line.split()
    for line in """
    doge_fast._layout doge_fast.simplex doge_fast.generalization doge_fast.tracing \
        doge_fast.sampling doge_fast.changes
    doge_fast.kernels doge_fast.rows
    doge_fast.mixture doge_fast.flat_buffer doge_fast.objective doge_fast.info
    doge_fast.layers.batch
    doge_fast.layers.by_slices doge_fast.layers.token_sums
    doge_fast.layers.rule
    doge_fast.layers.linear doge_fast.layers.embedding doge_fast.layers.stacked_layer
    doge_fast.layers.norms
    doge_fast.layers.registry
    doge_fast.example_norms
    doge_fast.checkpoint doge_fast.reweighting doge_fast.stacked doge_fast.subset \
        doge_fast.cancellation doge_fast.distributed
    doge_fast.optimizer doge_fast.reference doge_fast.losses
    doge_fast.integrations
    doge_fast.pipeline.config
    doge_fast.pipeline.experiments.presets doge_fast.pipeline.reporting.paper \
        doge_fast.pipeline.local_corpus doge_fast.pipeline.cache doge_fast.pipeline.sampling \
        doge_fast.pipeline.weights_fields doge_fast.pipeline.exports.shares
    doge_fast.pipeline.sources doge_fast.pipeline.exports.mixture
    doge_fast.pipeline.packing doge_fast.pipeline.experiments.plans \
        doge_fast.pipeline.exports.target doge_fast.pipeline.exports.text
    doge_fast.pipeline.model doge_fast.pipeline.domains doge_fast.pipeline.records \
        doge_fast.pipeline.baselines \
        EXPORT_FAMILIES
    doge_fast.pipeline.exports.registry
    doge_fast.pipeline.reporting.wording
    doge_fast.pipeline.reporting.statistics
    doge_fast.pipeline.reporting.runs
    doge_fast.pipeline.reporting.study
    doge_fast.pipeline.reporting.mixtures doge_fast.pipeline.reporting.experiment
    doge_fast.pipeline.reporting.verdicts doge_fast.pipeline.reporting.plotting
    doge_fast.pipeline.training doge_fast.pipeline.reporting.tables \
        doge_fast.pipeline.reporting.figures doge_fast.pipeline.weights
    doge_fast.pipeline.reporting.arms doge_fast.pipeline.reporting.arm_figures
    doge_fast.pipeline.reporting.kinds
    doge_fast.pipeline.reporting.findings
    STAGES
    doge_fast.pipeline.demo doge_fast.pipeline.experiments.runner
    doge_fast.cli
    doge_fast.__main__
    """.replace(
        "EXPORT_FAMILIES",
        " ".join(
            f"doge_fast.pipeline.exports.{family}"
            for family in ("megatron", "mosaic", "configs", "loaders", "tables")
        ),
    )
    .replace(
        "STAGES",
        " ".join(
            f"doge_fast.pipeline.{stage}"
            for stage in (
                *("proxy", "base", "doremi", "selection", "evaluation", "fewshot"),
                *("exports.command", "report", "profiling", "weights_verbs"),
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


def test_reference_imports_torch_only() -> None:
    path = ROOT / "doge_fast" / "reference.py"
    assert imports(path) == set()


def test_kernels_folder_is_no_package() -> None:
    """With an __init__.py it would shadow a public package of the same name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "doge_fast").exists()
