"""Modules without a rule in a stacked pass: one forward per domain, on slices of the input.

Exact for every module that treats examples one by one. In the forward of a domain an alias replaces
each parameter. So autograd keeps the gradients of the domains apart.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from doge_fast.stacked.layers.batch import Segment

Receive = Callable[[int, Tensor, Tensor], object]
"""`receive(row, param, grad)` takes the gradient of one domain."""

# torch's names of masks of positions, [T, T], which all examples share.
_POSITION_MASKS = {"attn_mask", "src_mask", "tgt_mask", "memory_mask"}
# Values beside tensors that domains may share: as arguments, and as outputs if they are the same.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


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

    A tensor is sliced if its first dimension is the examples; every domain gets other tensors and
    plain values whole. `tracked` are the ids of the trained parameters, whose gradients `receive`
    takes in the backward pass.

    Raises:
        RuntimeError: the examples are not in the first dimension of an argument, or of an output;
            or an argument is an object, or a list of one value for each example.
    """
    if parametrize._cache_enabled:
        # All domains would compute with the first one's alias, and their gradients reach its row.
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain, which "
            "parametrize.cached() makes wrong. Call the model outside it."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values = (*args, *kwargs.values())
    size = segments[-1].last
    # A mask of positions is [T, T], with T = B by chance.
    masks = {id(kwargs[name]) for name in _POSITION_MASKS & kwargs.keys()}
    are_sliced = [
        _is_batch(x, size) and not (id(x) in masks and list(x.shape) == [size, size])
        for x in leaves
    ]
    is_packed = any(isinstance(value, PackedSequence) for value in values)
    # Time first may be as long as the batch.
    is_time_first = getattr(module, "batch_first", True) is False
    if not any(are_sliced) or is_packed or is_time_first:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain: the {size} examples of "
            "the batch must be in the first dimension of an argument, with batch_first=True and "
            f"without a PackedSequence; got {[getattr(x, 'shape', x) for x in leaves]}. Run one "
            "domain after another, with optimizer.domain(name)."
        )
    # An object would be shared by the domains, as a cache of keys and values is. Each domain would
    # get a list of B numbers whole.
    shared = [x for x in leaves if not isinstance(x, (Tensor, *_PLAIN))]
    shared += [
        x
        for x in values
        if isinstance(x, list) and len(x) == size and not all(_is_batch(y, size) for y in x)
    ]
    if shared:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain, and cannot divide its "
            f"argument of {type(shared[0]).__name__}. Give values of examples as a tensor, and no "
            "cache (use_cache=False), or run one domain after another."
        )
    outputs = []
    for segment in segments:
        part = slice(segment.first, segment.last)
        pairs = zip(leaves, are_sliced, strict=True)
        parts = [leaf[part] if is_sliced else leaf for leaf, is_sliced in pairs]
        domain_args, domain_kwargs = pytree.tree_unflatten(parts, spec)
        with _aliases(module, segment.row, tracked, receive):
            outputs.append(forward(*domain_args, **domain_kwargs))
    # [T, U, features] of an example may be 1, T, T * U or T * U * features tokens.
    shapes = [x.shape[1:] for x, is_sliced in zip(leaves, are_sliced, strict=True) if is_sliced]
    token_counts = {prod(shape[:dims]) for shape in shapes for dims in range(len(shape) + 1)}
    sizes = [segment.last - segment.first for segment in segments]
    return _joined(module, outputs, sizes, token_counts)


def _is_batch(value: object, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


@contextmanager
def _aliases(
    module: nn.Module, row: int, tracked: Collection[int], receive: Receive
) -> Iterator[None]:
    """Replace the parameters of `module` by aliases whose gradients go to one row."""
    swapped = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and param.requires_grad and id(param) in tracked:
                # A parameter of two owners has two aliases: their gradients add up in its row.
                alias = _alias(param, row, receive)
                owner._parameters[name] = alias  # type: ignore[assignment]
                swapped.append((owner, name, param, alias))
    try:
        yield
    finally:
        for owner, name, param, alias in swapped:
            owner._parameters[name] = param
            if alias.data_ptr() != param.data_ptr():
                # The forward has set `self.weight.data`.
                param.data = alias.detach()


def _alias(param: Tensor, row: int, receive: Receive) -> Tensor:
    # A leaf, whose casts autocast keeps; backward(inputs=parameters) does not reach it.
    alias = param.detach().requires_grad_()
    # Autograd casts the gradient to it.
    alias.grad_dtype = param.grad_dtype

    def hand_over(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        receive(row, param, grad)

    alias._backward_hooks = param._backward_hooks
    alias.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return alias


def _joined(
    module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int], token_counts: Collection[int]
) -> Any:
    """The outputs of the domains as one: tensors concatenated, other values if they are the same.

    `token_counts` are the numbers of tokens that an example may have.
    """
    leaves_of_domains, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise _cannot_join(module, "outputs of different structure")
    joined: list[Any] = []
    for index, leaves in enumerate(zip(*leaves_of_domains, strict=True)):
        first = leaves[0]
        if isinstance(first, Tensor):
            # The state of a recurrent network is [layers, B, features].
            is_state = isinstance(module, nn.RNNBase) and index > 0 and first.dim() == 3
            dim = 1 if is_state else 0
            if not _have_examples(module, leaves, dim, sizes, token_counts):
                raise _cannot_join(
                    module,
                    f"tensors of {[list(leaf.shape) for leaf in leaves]}, whose first dimension is "
                    f"not the {list(sizes)} examples of the domains",
                )
            joined.append(torch.cat(leaves, dim))
        elif isinstance(first, _PLAIN) and set(leaves) == {first}:
            joined.append(first)
        else:
            raise _cannot_join(module, f"outputs of {type(first).__name__}, which may differ")
    return pytree.tree_unflatten(joined, specs[0])


def _cannot_join(module: nn.Module, what: str) -> RuntimeError:
    return RuntimeError(
        f"stacked mode runs {type(module).__name__} once per domain and cannot join {what}. Run "
        "one domain after another, with optimizer.domain(name)."
    )


def _have_examples(
    module: nn.Module,
    leaves: Sequence[Tensor],
    dim: int,
    sizes: Sequence[int],
    token_counts: Collection[int],
) -> bool:
    """Whether dimension `dim` of each domain's tensor has its examples, or their tokens."""
    lengths = [leaf.shape[dim] if leaf.dim() else 0 for leaf in leaves]
    per_example = lengths[0] // sizes[0]
    if per_example == 0 or lengths != [per_example * size for size in sizes]:
        return False
    if per_example == 1:
        return True
    storage = leaves[0].untyped_storage().data_ptr()
    if any(param.untyped_storage().data_ptr() == storage for param in module.parameters()):
        # A parameter, or a view of it, such as a table of codes.
        return False
    # [examples * T, features] or [examples * T]; T - 1 where each token predicts the next. Another
    # number may belong to the domain as a whole, as the loads of experts do.
    return leaves[0].dim() < 3 and (per_example in token_counts or per_example + 1 in token_counts)
