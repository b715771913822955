"""The K x K step through the CUDA extension: one launch of one block."""

from torch import Tensor

from doge_fast.kernels.build import cuda_operators
from doge_fast.kernels.reweight import torch_

# The vectors of a step stand in shared memory.
MAX_ROWS = 1024


def reweight(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    tau_R: Tensor,
    present_R: Tensor,
    settings_C: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip, estimate, score, move, commit; more rows than a block can hold go to plain torch."""
    is_small = len(tau_R) <= MAX_ROWS
    run = cuda_operators(gram_RR.device.type).reweight if is_small else torch_.reweight
    values_V, skipped, found_inf = run(gram_RR, full_RR, state_S, tau_R, present_R, settings_C)
    return values_V, skipped, found_inf
