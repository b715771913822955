"""Modules without a rule in a stacked pass: one forward per domain, on slices of the input.

Exact for every module that treats examples one by one. Each domain's forward uses its own alias of
every parameter, so autograd keeps the domains' gradients apart.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from doge_fast.stacked.layers.batch import Segment

Receive = Callable[[int, Tensor, Tensor], object]
"""`receive(row, param, grad)` takes the gradient of one domain."""

# Values beside tensors that domains may have in common.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
# As torch names masks of positions, [T, T], and as masks of examples' own tokens are named, [B, T].
_SQUARE_MASKS = {"attn_mask", "src_mask", "tgt_mask", "memory_mask"}
_MASKS = ("padding_mask", "attention_mask")
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
    leaves, spec = pytree.tree_flatten((args, kwargs))
    size = segments[-1].last
    masks = {id(kwargs[name]) for name in _SQUARE_MASKS & kwargs.keys()}
    are_examples = [
        isinstance(x, Tensor)
        and x.dim() > 0
        and len(x) == size
        and not (id(x) in masks and list(x.shape) == [size, size])
        for x in leaves
    ]
    others = (x for name, x in kwargs.items() if not name.endswith((*_SQUARE_MASKS, *_MASKS)))
    _refuse(module, (*args, *others), size)
    if not any(are_examples):
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and found no argument "
            f"whose first dimension is the {size} examples of the batch. {INSTEAD}"
        )
    outputs = []
    for segment in segments:
        part = slice(segment.first, segment.last)
        pairs = zip(leaves, are_examples, strict=True)
        sliced = [leaf[part] if is_sliced else leaf for leaf, is_sliced in pairs]
        sliced_args, sliced_kwargs = pytree.tree_unflatten(sliced, spec)
        with _aliases(module, segment.row, tracked, receive):
            outputs.append(forward(*sliced_args, **sliced_kwargs))
    return _concatenated(module, outputs, [segment.last - segment.first for segment in segments])


def _refuse(module: nn.Module, values: Sequence[Any], size: int) -> None:
    """Refuse arguments whose examples are not, or may not be, in the first dimension."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    # After the input, which may have as many features as examples.
    masks = [x for x in tensors[1:] if x.is_floating_point() or x.dtype == torch.bool]
    indices = [x for x in tensors if x.dim() == 1 and not x.is_floating_point()]
    is_square = any(list(x.shape[:2]) == [size, size] for x in tensors)
    if getattr(module, "batch_first", True) is False and tensors and tensors[0].dim() == 3:
        got = "batch_first=False: make it with batch_first=True"
    elif any(isinstance(value, PackedSequence) for value in values):
        got = "a PackedSequence"
    elif any(list(x.shape) == [size, size] for x in masks):
        got = (
            f"{[size, size]} for {size} examples, which may be a mask: name that attn_mask=, or "
            "give values of examples as [B, 1, features]"
        )
    elif is_square and isinstance(module, nn.Embedding) and any(len(x) == size for x in indices):
        got = f"indices of {size} examples or positions: give them as [B, 1] or [1, L]"
    elif any(type(value).__name__.endswith("Cache") for value in values):
        got = "a cache that domains would share: call the model with use_cache=False"
    else:
        return
    raise RuntimeError(
        "stacked mode needs the examples of the batch in the first dimension; "
        f"{type(module).__name__} has {got}. {INSTEAD}"
    )


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

    alias._backward_hooks = param._backward_hooks
    alias.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return alias


def _concatenated(module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The domains' outputs as one: tensors concatenated, other values if all domains agree."""

    def refuse(what: str) -> NoReturn:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and cannot join its "
            f"{what}. {INSTEAD}"
        )

    leaves_of_domains, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        refuse("outputs, which differ in their structure")
    networks = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    states = [[each.num_layers * (1 + each.bidirectional), sizes[0]] for each in networks]
    whole: list[Any] = []
    for index, leaves in enumerate(zip(*leaves_of_domains, strict=True)):
        first = leaves[0]
        if not isinstance(first, Tensor):
            # Keys and values for later tokens, which training does not read.
            is_cache = type(first).__name__.endswith("Cache")
            if not is_cache and (not isinstance(first, _PLAIN) or set(leaves) != {first}):
                refuse(f"outputs of {type(first).__name__}")
            whole.append(None if is_cache else first)
            continue
        # The state of a recurrent network is [layers, B, features].
        is_state = isinstance(module, nn.RNNBase) and index > 0 and first.dim() == 3
        if not isinstance(module, nn.RNNBase) and list(first.shape[:-1]) in states:
            refuse(f"output of shape {list(first.shape)}, which may be a state of each layer")
        dim = 1 if is_state else 0
        lengths = [leaf.shape[dim] if leaf.dim() else 0 for leaf in leaves]
        per_example = lengths[0] // sizes[0]
        # Flattened tokens are [B * T, features]; more dimensions may be a state of every layer.
        is_flat = per_example == 1 or (per_example > 1 and first.dim() < 3)
        if not is_flat or lengths != [per_example * size for size in sizes]:
            refuse(
                f"output of shape {list(first.shape)}, whose first dimension is not the {sizes[0]} "
                "examples of the domain"
            )
        whole.append(torch.cat(leaves, dim))
    return pytree.tree_unflatten(whole, specs[0])
