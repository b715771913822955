"""The formulas of docs/scale.md: what a step costs on n ranks, in memory and in bytes sent.

K is the number of rows of a step (with `domains_per_step`, of the drawn domains and the targets),
N the number of parameters.
"""

import math

FLOAT32 = 4
# Gram matrices are float64.
FLOAT64 = 8
# AdamW's two moments.
MOMENTS = 2


def num_pieces(num_rows: int, num_ranks: int) -> int:
    """F = K + n - gcd(K, n): pieces of rows when n equal pieces of a batch hold K equal domains."""
    return num_rows + num_ranks - math.gcd(num_rows, num_ranks)


def most_rows(num_rows: int, num_ranks: int) -> int:
    """The largest number of domains with a piece on one rank."""
    return max(
        -(-(rank + 1) * num_rows // num_ranks) - rank * num_rows // num_ranks
        for rank in range(num_ranks)
    )


def training_bytes(num_params: int, num_ranks: int = 1) -> dict[str, int]:
    """What plain training keeps in float32; `num_ranks` > 1 divides it into shards."""
    return {
        "parameters": FLOAT32 * num_params // num_ranks,
        "gradients": FLOAT32 * num_params // num_ranks,
        "AdamW": MOMENTS * FLOAT32 * num_params // num_ranks,
    }


def rows_bytes(num_params: int, num_rows: int, itemsize: int) -> int:
    """Stored gradients, without their padding."""
    return num_rows * num_params * itemsize


def exchanged_bytes(num_params: int, num_rows: int, num_ranks: int, itemsize: int) -> int:
    """What a data-parallel rank holds during the all-to-all: the rows sent and received."""
    if num_ranks == 1:
        return 0
    received = num_pieces(num_rows, num_ranks) * num_params // num_ranks
    return rows_bytes(num_params, most_rows(num_rows, num_ranks), itemsize) + received * itemsize


def gathered_gram_bytes(num_rows: int, num_ranks: int) -> int:
    """The Gram matrices of all ranks, which each rank gathers and adds."""
    return num_ranks * FLOAT64 * num_rows**2 if num_ranks > 1 else 0


def data_parallel_bytes(num_params: int, num_rows: int, num_ranks: int, itemsize: int) -> float:
    """Bytes that a rank sends: the all-to-all of rows, the all-gathers of sums and Gram matrices.

    (n - 1) / n N (F / n b + 4) + 8 (n - 1) K^2, averaged over ranks; b is `itemsize`.
    """
    share = (num_ranks - 1) / num_ranks * num_params
    rows = num_pieces(num_rows, num_ranks) / num_ranks * itemsize
    return share * (rows + FLOAT32) + (num_ranks - 1) * FLOAT64 * num_rows**2


def ddp_bytes(num_params: int, num_ranks: int) -> float:
    """Plain data parallelism: a reduce-scatter and an all-gather."""
    return 2 * (num_ranks - 1) / num_ranks * num_params * FLOAT32


def sharded_bytes(
    num_params: int, num_rows: int, num_ranks: int, passes: int, *, are_kept: bool
) -> float:
    """FSDP2: (n - 1) / n N float32 for each gather of the parameters and each reduce-scatter.

    A pass gathers before forward and before backward, and reduces once. If gathered parameters are
    kept (`are_kept`), all passes share one gather. A plain step is one pass, not kept, without
    rows.
    """
    units = passes + 1 if are_kept else 3 * passes
    share = (num_ranks - 1) / num_ranks * num_params * FLOAT32
    return units * share + (num_ranks - 1) * FLOAT64 * num_rows**2
