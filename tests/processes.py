"""Programs in processes of their own: for what is imported, built or said once in a process."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def ended(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """How a command ends, and what it says.

    Args:
        command: the program and its words.
        cwd: where it runs, if not here.
        env: all of its environment, if not this one.
    """
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def printed_by(*command: str | Path, **where: Any) -> str:
    """What a command prints; it fails with all that was said. Arguments: those of `ended`."""
    done = ended(*command, **where)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def shell_script(path: Path, text: str) -> Path:
    """A program at `path`, which stands for another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
