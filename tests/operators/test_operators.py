"""What holds for all operators: arguments that are refused, one graph, memory on two devices."""

import pytest
import torch
from torch import Tensor

from doge_fast.kernels import (
    accumulate,
    cross_entropy,
    gram,
    gram_and_sum,
    implementations,
    scale_rows,
    segment_sum,
    weighted_sum,
)
from doge_fast.kernels.dispatch import OPERATORS, by_device

GRAD, ROWS = torch.ones(5), torch.ones(2, 5)
VALUES_TD, OUT_GRD = torch.ones(6, 4), torch.ones(2, 1, 4)
SEGMENTS = (VALUES_TD, OUT_GRD)
STATISTICS = {"mean_T": torch.zeros(6), "rstd_T": torch.ones(6)}
LOGITS_TV, TARGETS_T, SHARES_T = torch.ones(3, 4), torch.ones(3).long(), torch.ones(3)
ONE, HALVES, WRONG = torch.ones(1), {"halves": True, "out": [GRAD]}, {"second_moments": [GRAD[:4]]}
BIAS = {"factor_TD": VALUES_TD}


@pytest.mark.parametrize(
    ("operator", "arguments", "options", "message"),
    [
        (gram, ([GRAD],), {}, r"blocks\[0\] has shape \[5\]"),
        (gram, ([torch.ones(0, 5)],), {}, r"shape \[0, 5\]"),
        (gram, ([ROWS.long()],), {}, "torch.int64"),
        (gram, ([ROWS, torch.ones(3, 5)],), {}, r"blocks\[0\] has 2, blocks\[1\] has 3"),
        (gram, ([torch.ones(5, 2).T],), {}, r"strides \[1, 2\]"),
        (gram, ([ROWS],), {"second_moments": []}, "1 blocks and 0 second_moments"),
        (gram, ([ROWS],), {"second_moments": [torch.ones(4)]}, "5 elements.* 4"),
        (gram, ([ROWS, ROWS],), {"second_moments": [None, torch.ones(6)]}, r"moments\[1\] has 6"),
        (gram, ([ROWS],), {"second_moments": [GRAD.int()]}, r"second_moments\[0\] is torch.int32"),
        (gram, ([ROWS],), {"second_moments": [torch.ones(10)[::2]]}, "strides"),
        (gram, (ROWS,), {"second_moments": GRAD, "eps": -1.0}, "eps .*-1.0"),
        (gram, (ROWS,), {"second_moments": GRAD, "eps": float("nan")}, "eps .*nan"),
        (weighted_sum, ([ROWS], torch.ones(3)), {}, r"shape \[2\] on cpu; .* \[3\]"),
        (weighted_sum, ([ROWS], torch.ones(2)), {"out": []}, "1 blocks and 0 outs"),
        (weighted_sum, ([ROWS], torch.ones(2)), {"out": [torch.ones(4)]}, "5 elements.* 4"),
        (weighted_sum, ([ROWS], torch.ones(2)), {"out": [GRAD.int()]}, r"outs\[0\] is torch.int32"),
        (weighted_sum, ([ROWS], torch.ones(2)), {"out": [torch.ones(10)[::2]]}, "strides"),
        (gram_and_sum, ([ROWS.long()], ONE), {"out": [GRAD]}, "torch.int64"),
        (gram_and_sum, ([ROWS], ONE), HALVES | {"out": []}, "1 blocks and 0 outs"),
        (gram_and_sum, ([ROWS], ONE), HALVES | {"out": [torch.ones(4)]}, "5 elements.* 4"),
        (gram_and_sum, ([ROWS], ONE), HALVES | {"out": [GRAD.int()]}, r"outs\[0\] is torch.int32"),
        (gram_and_sum, ([ROWS], torch.ones(3)), {"out": [GRAD]}, r"shape \[2\] on cpu; .* \[3\]"),
        (gram_and_sum, ([ROWS], ONE), HALVES | WRONG, "5 elements.* 4"),
        (gram_and_sum, ([ROWS], torch.ones(2)), {"out": [GRAD]} | WRONG, "5 elements.* 4"),
        (accumulate, ([GRAD], []), {"add": True}, "1 grads and 0 rows"),
        (accumulate, ([], [GRAD]), {"add": True}, "0 grads and 1 rows"),
        (accumulate, ([GRAD], [torch.ones(4)]), {"add": True}, r"accumulate\(\) .*5 elements.* 4"),
        (accumulate, ([GRAD.int()], [GRAD]), {"add": True}, r"grads\[0\] is torch.int32"),
        (accumulate, ([GRAD.to_sparse()], [GRAD]), {"add": True}, "sparse_coo"),
        (accumulate, ([GRAD], [GRAD.int()]), {"add": True}, r"rows\[0\] is torch.int32"),
        (accumulate, ([GRAD], [torch.ones(10)[::2]]), {"add": True}, "strides"),
        (cross_entropy, (torch.ones(3), TARGETS_T), {}, r"logits_TV \[T, V\]"),
        (cross_entropy, (LOGITS_TV.int(), TARGETS_T), {}, "torch.int32"),
        (cross_entropy, (torch.ones(4, 3).T, TARGETS_T), {}, r"strides \[1, 3\]"),
        (cross_entropy, (LOGITS_TV, SHARES_T), {}, "targets_T .*torch.int64"),
        (cross_entropy, (LOGITS_TV, TARGETS_T[:2]), {}, r"shape \[3\] .* shape \[2\]"),
        (cross_entropy, (LOGITS_TV, TARGETS_T, SHARES_T.half()), {}, "shares_T .*torch.float32"),
        (scale_rows, (torch.ones(3), SHARES_T), {}, r"values_RN \[R, N\]"),
        (scale_rows, (LOGITS_TV.int(), SHARES_T), {}, "torch.int32"),
        (scale_rows, (LOGITS_TV, torch.ones(4)), {}, "each of 3 rows"),
        (segment_sum, (torch.ones(6), OUT_GRD), {}, r"values_TD \[T, D\]"),
        (segment_sum, (VALUES_TD, torch.ones(2, 1, 3)), {}, r"\[6, 4\] and \[2, 1, 3\]"),
        (segment_sum, (torch.ones(7, 4), OUT_GRD), {}, "7 tokens .* borders"),
        (segment_sum, SEGMENTS, {"borders": torch.zeros(2).long()}, "borders"),
        (segment_sum, SEGMENTS, {"order": torch.zeros(6).long()}, "order with segment_T"),
        (segment_sum, SEGMENTS, {"segment_T": torch.zeros(6)}, "segment_T .*torch.int64"),
        (segment_sum, SEGMENTS, BIAS | {"segment_T": torch.zeros(6).long()}, "place of borders"),
        (segment_sum, SEGMENTS, {"mean_T": torch.zeros(6)}, "mean_T and rstd_T together"),
        (segment_sum, SEGMENTS, STATISTICS, "with factor_TD"),
        (segment_sum, SEGMENTS, {"factor_TD": torch.ones(4, 6).T}, "factor_TD contiguous"),
        (segment_sum, SEGMENTS, {"bias_GRD": OUT_GRD}, "bias_GRD beside factor_TD"),
        (segment_sum, SEGMENTS, BIAS | {"bias_GRD": torch.ones(3, 1, 4)}, "of the shape of"),
        (segment_sum, SEGMENTS, BIAS | {"bias_GRD": OUT_GRD.half()}, r"bias_GRD\[0\] .*float16"),
        (segment_sum, (VALUES_TD.int(), OUT_GRD), {}, "values_TD .* torch.int32"),
        (segment_sum, (VALUES_TD, torch.ones(2, 1, 8)[..., ::2]), {}, r"out_GRD\[0\] contiguous"),
    ],
)
def test_arguments_are_refused_before_anything_is_written(
    operator, arguments, options, message, implementation
):
    if implementations("cpu")[implementation] is not None:
        pytest.skip("the arguments are on the CPU")
    if implementation not in OPERATORS[operator.__name__].implementations:
        pytest.skip(f"not written in {implementation}")
    with pytest.raises(ValueError, match=message):
        operator(*arguments, **options, implementation=implementation)
    assert all((tensor == 1).all() for tensor in (GRAD, ROWS, VALUES_TD, OUT_GRD, LOGITS_TV))


def test_operators_trace_into_one_graph(implementation, device):
    of_rows = implementation if implementation in OPERATORS["accumulate"].implementations else None

    def step(grad_N: Tensor, rows_KN: Tensor, other_CK: Tensor) -> tuple[Tensor, Tensor]:
        accumulate([grad_N * 2, grad_N], [*rows_KN], add=True, implementation=of_rows)
        blocks = [rows_KN * 2, other_CK.mT]
        gram_KK = gram(blocks, implementation=implementation)
        gram_KK += gram(
            blocks, second_moments=[grad_N.square(), None], implementation=implementation
        )
        out_N = torch.zeros_like(grad_N)
        weighted_sum([rows_KN + 1], gram_KK[0], out=[out_N], implementation=implementation)
        return gram_KK.sum(0) + gram(rows_KN).diagonal(), out_N * 2

    grad_N, rows_KN = torch.randn(20, device=device), torch.randn(2, 20, device=device)
    # Columns before rows, which a compiler must leave as they are.
    other_CK = torch.randn(2, 9, device=device).mT
    expected_KN = rows_KN.clone()
    expected = step(grad_N, expected_KN, other_CK)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(grad_N, rows_KN, other_CK), expected))
    assert torch.equal(rows_KN, expected_KN)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs memory on two devices")
def test_blocks_may_stand_on_two_devices():
    blocks = [torch.randn(3, 20), torch.randn(3, 9, device="cuda"), torch.randn(3, 5)]
    gram_KK = gram(blocks)
    assert gram_KK.device == torch.device("cpu")
    rows_KN = torch.cat([block.cpu().double() for block in blocks], dim=1)
    torch.testing.assert_close(gram_KK, rows_KN @ rows_KN.T, rtol=0, atol=1e-5)
    for block, out in zip(blocks, weighted_sum(blocks, torch.eye(3)[1]), strict=True):
        assert torch.equal(out, block[1])
    rows = [torch.zeros_like(block[1]) for block in blocks]
    accumulate([block[1] for block in blocks], rows, add=True)
    assert all(torch.equal(row, block[1]) for row, block in zip(rows, blocks, strict=True))


def test_tensors_are_grouped_by_device():
    here, there = torch.empty(1), torch.empty(1, device="meta")
    assert by_device([here, there, here]) == [[0, 2], [1]]
