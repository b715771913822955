"""Modules without a rule in a stacked pass: once per domain, on slices of their input.

Exact for everything that treats examples one by one. The parameters are replaced by one alias for
each domain, so that autograd tells their gradients apart.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from doge_fast.stacked.layers.batch import Segment

Receive = Callable[[int, Tensor, Tensor], object]
"""`receive(row, param, grad)` takes the gradient of one domain."""


def outputs_by_slices(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    segments: Sequence[Segment],
    tracked: Collection[int],
    receive: Receive,
) -> Any:
    """The output for the whole batch, of one forward per domain.

    Args:
        module: that has no rule.
        forward: its own.
        args: of the whole batch: tensors with the examples in front are cut.
        kwargs: likewise.
        segments: the domains; together the batch.
        tracked: ids of the parameters whose gradients are received.
        receive: takes them, in the backward pass.

    Raises:
        RuntimeError: no argument has the examples in front, or an output has not.
    """
    _refuse_time_first(module, args, kwargs)
    outputs = []
    for segment in segments:
        its_args, its_kwargs = _cut(module, segment, segments[-1].last, (args, kwargs))
        with _aliased(module, segment.row, tracked, receive):
            outputs.append(forward(*its_args, **its_kwargs))
    return _joined(module, outputs, [segment.last - segment.first for segment in segments])


def _refuse_time_first(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Recurrent networks and attention may have the batch second, where it is not cut."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if getattr(module, "batch_first", True) is False and tensors and tensors[0].dim() == 3:
        raise RuntimeError(
            "stacked mode needs the examples of the batch in the first dimension; "
            f"{type(module).__name__} was made with batch_first=False and has them in the second. "
            "Make it with batch_first=True, or run one domain after another, with "
            "optimizer.domain(name)."
        )


def _cut(module: nn.Module, segment: Segment, num_examples: int, values: Any) -> Any:
    """The arguments of one domain."""
    num_cut = 0

    def cut(value: Any) -> Any:
        nonlocal num_cut
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_examples:
            num_cut += 1
            return value[segment.first : segment.last]
        return value

    of_domain = pytree.tree_map(cut, values)
    if not num_cut:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and found no argument "
            f"whose first dimension is the {num_examples} examples of the batch. Run one domain "
            "after another, with optimizer.domain(name)."
        )
    return of_domain


@contextmanager
def _aliased(
    module: nn.Module, row: int, tracked: Collection[int], receive: Receive
) -> Iterator[None]:
    """Parameters of `module` as leaves of their own, whose gradients belong to one row."""
    aliases: dict[int, Tensor] = {}
    swapped = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and id(param) in tracked:
                if id(param) not in aliases:
                    aliases[id(param)] = _alias(param, row, receive)
                swapped.append((owner, name, param))
                owner._parameters[name] = aliases[id(param)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, name, param in swapped:
            owner._parameters[name] = param


def _alias(param: Tensor, row: int, receive: Receive) -> Tensor:
    alias = param.detach().requires_grad_()

    def hand_over(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        receive(row, param, grad)

    alias.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return alias


def _joined(module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of all domains as one: tensors end to end, the rest as the first has it."""
    leaves_DP, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    joined = []
    for index, leaves in enumerate(zip(*leaves_DP, strict=True)):
        first = leaves[0]
        if not isinstance(first, Tensor):
            joined.append(first)
            continue
        # The state of a recurrent network has its layers in front.
        is_state = isinstance(module, nn.RNNBase) and index > 0 and first.dim() == 3
        dim = 1 if is_state else 0
        lengths = [leaf.shape[dim] if leaf.dim() else 0 for leaf in leaves]
        per_example = lengths[0] // sizes[0]
        if per_example == 0 or lengths != [per_example * size for size in sizes]:
            raise RuntimeError(
                f"stacked mode runs {type(module).__name__} once per domain and cannot join its "
                f"output of shape {list(first.shape)}, whose first dimension is not the {sizes[0]} "
                "examples of the domain. Run one domain after another, with optimizer.domain(name)."
            )
        joined.append(torch.cat(leaves, dim))
    return pytree.tree_unflatten(joined, specs[0])
