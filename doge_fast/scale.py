"""What a step costs on n ranks, on paper: memory, and bytes that are sent.

Formulas and nothing else; docs/scale.md and the dry run of a stage show what they give. Each says
which test holds it against what was counted. K is the number of rows of a step (with
`domains_per_step` these domains alone, and the measured targets), N that of parameters.
"""

import math

FLOAT32 = 4
# Of an element of a Gram matrix.
FLOAT64 = 8
# AdamW's two moments.
MOMENTS = 2


def num_pieces(num_rows: int, num_ranks: int) -> int:
    """F = K + n - gcd(K, n): pieces of rows when n equal pieces of a batch hold K equal domains."""
    return num_rows + num_ranks - math.gcd(num_rows, num_ranks)


def most_rows(num_rows: int, num_ranks: int) -> int:
    """The most domains of which a rank has a piece.

    Held by tests/method/test_scale.py against `sampling.pieces`.
    """
    return max(
        -(-(rank + 1) * num_rows // num_ranks) - rank * num_rows // num_ranks
        for rank in range(num_ranks)
    )


# Memory of a rank, {what: bytes}.


def training_bytes(num_params: int, num_ranks: int = 1) -> dict[str, int]:
    """What plain training keeps in float32, in shards of n ranks; 1 where each has all."""
    return {
        "parameters": FLOAT32 * num_params // num_ranks,
        "gradients": FLOAT32 * num_params // num_ranks,
        "AdamW": MOMENTS * FLOAT32 * num_params // num_ranks,
    }


def rows_bytes(num_params: int, num_rows: int, itemsize: int) -> int:
    """Stored gradients, without their padding.

    Held by tests/integrations/test_scale_over_ranks.py against the buffer, and by
    tests/method/test_scale.py in one process.
    """
    return num_rows * num_params * itemsize


def exchanged_bytes(num_params: int, num_rows: int, num_ranks: int, itemsize: int) -> int:
    """What data parallelism holds while rows travel: what a rank sends, and what comes.

    Held by tests/integrations/test_scale_over_ranks.py against the tensors that are exchanged.
    """
    if num_ranks == 1:
        return 0
    come = num_pieces(num_rows, num_ranks) * num_params // num_ranks
    return rows_bytes(num_params, most_rows(num_rows, num_ranks), itemsize) + come * itemsize


def gathered_gram_bytes(num_rows: int, num_ranks: int) -> int:
    """The Gram matrices of all ranks, which each rank adds up in their order.

    Held by tests/integrations/test_scale_over_ranks.py.
    """
    return num_ranks * FLOAT64 * num_rows**2 if num_ranks > 1 else 0


def layer_bytes(width: int, inner: int, itemsize: int) -> int:
    """What a layer of a transformer keeps of each token for the backward pass.

    Held by tests/integrations/test_architectures.py against what autograd saves.
    """
    # What is as wide as the model is float32 in part whatever the dtype of products.
    return 72 * width + 5 * itemsize * inner


def logit_bytes(itemsize: int) -> int:
    """Of an entry of the vocabulary, for each token: float32 with softmax and gradient, and in the
    dtype of the product with its gradient."""
    return 12 + 2 * itemsize


# Bytes that a rank sends in a step.


def data_parallel_bytes(num_params: int, num_rows: int, num_ranks: int, itemsize: int) -> float:
    """Pieces of rows to their columns' ranks, and the sums from there: on average of the ranks.

    (n - 1) / n N (F / n b + 4), b bytes of an element of the rows, and (n - 1) K^2 float64 of the
    Gram matrices. Held by tests/integrations/test_scale_over_ranks.py.
    """
    share = (num_ranks - 1) / num_ranks * num_params
    rows = num_pieces(num_rows, num_ranks) / num_ranks * itemsize
    return share * (rows + FLOAT32) + (num_ranks - 1) * FLOAT64 * num_rows**2


def ddp_bytes(num_params: int, num_ranks: int) -> float:
    """Of plain data parallelism: a reduce-scatter and an all-gather."""
    return 2 * (num_ranks - 1) / num_ranks * num_params * FLOAT32


def sharded_bytes(
    num_params: int, num_rows: int, num_ranks: int, passes: int, *, are_kept: bool
) -> float:
    """Of FSDP2: (n - 1) / n N float32 for each gather of the parameters and each reduce-scatter.

    A pass gathers before forward and backward and reduces once; with parameters that are kept all
    passes share one gather. A plain step is one pass that is not kept, and has no rows. Held by
    tests/integrations/test_scale_over_ranks.py and, of fragments, test_traffic_of_shards.py.
    """
    units = passes + 1 if are_kept else 3 * passes
    share = (num_ranks - 1) / num_ranks * num_params * FLOAT32
    return units * share + (num_ranks - 1) * FLOAT64 * num_rows**2
