"""Whole steps on a fake CUDA device, in a process of its own."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import fake_cuda
from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not torch.__version__.startswith(fake_cuda.TORCH),
    reason=f"the device knows the inner interfaces of torch {fake_cuda.TORCH}x",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true one")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_steps_on_a_fake_device(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    environment |= {"DOGE_FAST_BACKEND": "torch", **fake_cuda.build(tmp_path)}
    folder = Path(fake_cuda.__file__).parent
    # Captured steps keep their memory: what counts it comes first.
    programs = [folder / "memory.py", folder / "steps.py"]
    if importlib.util.find_spec("transformers") is not None:
        programs.append(folder / "trainer.py")
    command = (sys.executable, "-m", "pytest", "-p", "tests.fake_cuda", "-q", "-x", *programs)
    assert " passed" in printed_by(*command, cwd=ROOT, env=environment)
