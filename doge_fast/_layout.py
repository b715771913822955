"""Find the source folders of the kernels.

A checkout has `kernels/` and `csrc/` next to `doge_fast/`; a wheel has both in `doge_fast/_src/`.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
for _root in (_here / "_src", _here.parent):
    if (_root / "kernels").is_dir() and (_root / "csrc").is_dir():
        break
else:
    raise ImportError(
        f"doge_fast needs its folders kernels/ and csrc/; neither {_here / '_src'} nor "
        f"{_here.parent} holds both. Install the wheel again, or keep the checkout whole."
    )

KERNELS_DIR: Path = _root / "kernels"
