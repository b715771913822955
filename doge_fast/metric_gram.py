"""Until the operator has it."""

from doge_fast.kernels import gram as plain


def gram(rows, *, second_moments=None, eps=0.0):
    if second_moments is None:
        return plain(rows)
    total = 0.0
    for block, v in zip(rows, second_moments, strict=True):
        d = 1.0 if v is None else 1 / (v.to(block.dtype).sqrt() + eps)
        total = total + ((block * d) @ block.T).double()
    return (total + total.T) / 2
