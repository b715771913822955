"""Modules without a rule in a stacked pass: one forward per domain, on slices of the input.

Exact for every module that treats examples one by one. Each domain's forward uses its own alias of
every parameter, so autograd keeps the domains' gradients apart.
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

INSTEAD = "Run one domain after another, with optimizer.domain(name)."


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
    """The output for the whole batch, from one forward per domain.

    A tensor is sliced if its first dimension is the examples. `tracked` are the ids of the trained
    parameters, whose gradients `receive` takes in the backward pass.

    Raises:
        RuntimeError: no argument, or not every output, has the examples in its first dimension.
    """
    _refuse_time_first(module, args, kwargs)
    outputs = []
    for segment in segments:
        sliced_args, sliced_kwargs = _slice(module, segment, segments[-1].last, (args, kwargs))
        with _aliases(module, segment.row, tracked, receive):
            outputs.append(forward(*sliced_args, **sliced_kwargs))
    return _concatenated(module, outputs, [segment.last - segment.first for segment in segments])


def _refuse_time_first(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse recurrent networks and attention with the examples in the second dimension."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if getattr(module, "batch_first", True) is False and tensors and tensors[0].dim() == 3:
        raise RuntimeError(
            "stacked mode needs the examples of the batch in the first dimension; "
            f"{type(module).__name__} has batch_first=False and expects them in the second. "
            f"Make it with batch_first=True. {INSTEAD}"
        )


def _slice(module: nn.Module, segment: Segment, num_examples: int, values: Any) -> Any:
    is_found = False

    def slice_examples(value: Any) -> Any:
        nonlocal is_found
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_examples:
            is_found = True
            return value[segment.first : segment.last]
        return value

    sliced = pytree.tree_map(slice_examples, values)
    if not is_found:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and found no argument "
            f"whose first dimension is the {num_examples} examples of the batch. {INSTEAD}"
        )
    return sliced


@contextmanager
def _aliases(
    module: nn.Module, row: int, tracked: Collection[int], receive: Receive
) -> Iterator[None]:
    """Replace the parameters of `module` by aliases whose gradients go to one row."""
    swapped = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and id(param) in tracked:
                swapped.append((owner, name, param))
                # A parameter of two owners has two aliases: their gradients add up in its row.
                owner._parameters[name] = _alias(param, row, receive)  # type: ignore[assignment]
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


def _concatenated(module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The domains' outputs as one: tensors concatenated, other values from the first domain."""
    leaves_DP, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    whole = []
    for index, leaves in enumerate(zip(*leaves_DP, strict=True)):
        first = leaves[0]
        if not isinstance(first, Tensor):
            whole.append(first)
            continue
        # The state of a recurrent network is [layers, B, features].
        is_state = isinstance(module, nn.RNNBase) and index > 0 and first.dim() == 3
        dim = 1 if is_state else 0
        lengths = [leaf.shape[dim] if leaf.dim() else 0 for leaf in leaves]
        per_example = lengths[0] // sizes[0]
        if per_example == 0 or lengths != [per_example * size for size in sizes]:
            raise RuntimeError(
                f"stacked mode runs {type(module).__name__} once per domain and cannot join its "
                f"output of shape {list(first.shape)}, whose first dimension is not the {sizes[0]} "
                f"examples of the domain. {INSTEAD}"
            )
        whole.append(torch.cat(leaves, dim))
    return pytree.tree_unflatten(whole, specs[0])
