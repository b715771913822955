"""Steps on a GPU wait for nothing, and a CUDA graph can hold them."""

import pytest
import torch

from tests.gpu_steps import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: getattr(check, "__name__", "dampened"))
@pytest.mark.parametrize(
    "device",
    [
        "cuda:0",
        # Not the device in use, which a missing device guard takes instead.
        pytest.param(
            "cuda:1",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU"),
        ),
    ],
)
def test_steps_on_a_gpu(check, device):
    check(device)
