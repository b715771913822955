"""One name, one thing: no two classes of a package-level name in the library and its kernels."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Until their packages have been rewritten; whoever makes one of these unique takes it out here.
TEMPORARY = {
    "Difference",
    "Part",
    "Phase",
    "Plan",
    "Run",
    "Settings",
    "Span",
}


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for folder in ("doge_fast", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in TEMPORARY} == {}
