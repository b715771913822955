"""Modules without a rule in a stacked pass: one forward per domain, on slices of the input.

Exact for every module that treats examples one by one. Each domain's forward uses its own alias of
every parameter, so autograd keeps the domains' gradients apart.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
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
        _is_batch(x, size) and not (id(x) in masks and list(x.shape) == [size, size])
        for x in leaves
    ]
    others = (x for name, x in kwargs.items() if not name.endswith((*_SQUARE_MASKS, *_MASKS)))
    _refuse(module, (*args, *others), size)
    if not any(are_examples):
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and found no argument "
            f"whose first dimension is the {size} examples of the batch. {INSTEAD}"
        )
    shapes = [x.shape[1:] for x, is_sliced in zip(leaves, are_examples, strict=True) if is_sliced]
    num_tokens = {prod(shape[:dims]) for shape in shapes for dims in range(len(shape) + 1)}
    outputs = []
    for segment in segments:
        part = slice(segment.first, segment.last)
        pairs = zip(leaves, are_examples, strict=True)
        sliced = [leaf[part] if is_sliced else leaf for leaf, is_sliced in pairs]
        sliced_args, sliced_kwargs = pytree.tree_unflatten(sliced, spec)
        with _aliases(module, segment.row, tracked, receive):
            outputs.append(forward(*sliced_args, **sliced_kwargs))
    sizes = [segment.last - segment.first for segment in segments]
    return _concatenated(module, outputs, sizes, num_tokens)


def _is_batch(value: object, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def _refuse(module: nn.Module, values: Sequence[Any], size: int) -> None:
    """Refuse arguments whose examples are not, or may not be, in the first dimension."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    # After the input, which may have as many features as examples.
    masks = [x for x in tensors[1:] if x.is_floating_point() or x.dtype == torch.bool]
    is_own = not type(module).__module__.startswith("torch.nn")
    lists = (x for x in values if isinstance(x, list) and len(x) == size and is_own)
    if getattr(module, "batch_first", True) is False and tensors and tensors[0].dim() == 3:
        got = "batch_first=False: make it with batch_first=True"
    elif parametrize._cache_enabled:
        got = "parametrize.cached() around it, which would give all domains the first one's values"
    elif any(isinstance(value, PackedSequence) for value in values):
        got = "a PackedSequence"
    elif any(list(x.shape) == [size, size] for x in masks):
        got = (
            f"{[size, size]} for {size} examples, which may be a mask: name that attn_mask=, or "
            "give values of examples as [B, 1, features]"
        )
    elif any(isinstance(x, int | float | Tensor) and not _is_batch(x, size) for x in chain(*lists)):
        got = f"a list of {size} values, which may be those of the examples: give them as a tensor"
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
    alias.grad_dtype = param.grad_dtype

    def hand_over(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        receive(row, param, grad)

    alias._backward_hooks = param._backward_hooks
    alias.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return alias


def _is_own(output: Tensor, module: nn.Module) -> bool:
    """Whether an output is a parameter or a view of one, such as a table of codes."""
    place = output.untyped_storage().data_ptr()
    return any(param.untyped_storage().data_ptr() == place for param in module.parameters())


def _concatenated(
    module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int], num_tokens: Collection[int]
) -> Any:
    """The domains' outputs as one: tensors concatenated, other values if all domains agree.

    `num_tokens` are the numbers of tokens that an example may have.
    """

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
        # A vector of another length may be of the domain as a whole, as loads of experts are.
        is_known = first.dim() == 2 or bool({per_example, per_example + 1} & set(num_tokens))
        is_flat = per_example > 1 and first.dim() < 3 and is_known and not _is_own(first, module)
        are_whole = lengths == [per_example * size for size in sizes]
        if not (are_whole and (per_example == 1 or is_flat)):
            refuse(
                f"output of shape {list(first.shape)}, whose first dimension is not the {sizes[0]} "
                "examples of the domain"
            )
        whole.append(torch.cat(leaves, dim))
    return pytree.tree_unflatten(whole, specs[0])
