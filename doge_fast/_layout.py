"""Finds the folders that stand beside the package in a checkout and inside it in a wheel.

A checkout has `kernels/` and `csrc/` next to `doge_fast/`; a wheel carries them as
`doge_fast/_src/`. The first that holds both wins.
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
CSRC_DIR: Path = _root / "csrc"
