"""One name, one thing: no two package-level classes of the library have one name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_class_has_a_name_of_its_own():
    homes: dict[str, list[str]] = defaultdict(list)
    for folder in ("doge_fast", "kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
