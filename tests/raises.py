"""How many lines of each file stand in a `raise`: `python -m tests.raises [CHECKOUT]`."""

import ast
import sys
from pathlib import Path


def lines_in_raises(source: str) -> int:
    """Lines of all raise statements, their messages included."""
    raises = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    return len({line for node in raises for line in range(node.lineno, node.end_lineno + 1)})


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = sorted([*root.glob("doge_fast/**/*.py"), *root.glob("kernels/*.py")])
    core = [path.read_text("utf-8") for path in files if "pipeline" not in path.parts]
    for path in files:
        source = path.read_text("utf-8")
        if number := lines_in_raises(source):
            print(f"{number:5} of {len(source.splitlines()):5} {path.relative_to(root)}")
    in_core = sum(map(lines_in_raises, core))
    print(f"{in_core} of {sum(len(source.splitlines()) for source in core)} without pipeline/")


if __name__ == "__main__":
    main()
