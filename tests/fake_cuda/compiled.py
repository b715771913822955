"""What torch.compile makes of a body: the kernels of its scheduler, of which no code is made.

Inductor's own passes decide which operators become one kernel. Each kernel reads its inputs and
writes its outputs once.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from doge_fast.stacked import stacked

# Of the data sheet of an H100: inductor splits reductions by it.
PROPERTIES = SimpleNamespace(
    name="H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


def describe_device() -> None:
    """Have inductor ask for the properties above."""
    torch.cuda.get_device_properties = lambda device=None: PROPERTIES  # type: ignore[assignment]
    for owner in (CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda device=None: PROPERTIES)  # type: ignore[assignment]
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)  # type: ignore[assignment,method-assign]


def backend(counted: Any) -> Any:
    """A backend of torch.compile whose graphs add their kernels to `counted`, a `work.Counted`.

    A graph runs operator by operator; those of `doge_fast::fill_rows_` are counted one by one.
    """

    class Body(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is not torch.ops.doge_fast.fill_rows_.default:
                return super().call_function(target, args, kwargs)
            counted.is_on = True
            # The function itself: the operator does nothing for tensors without memory.
            stacked.fill_rows_._init_fn(*args)
            counted.is_on = False
            return None

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        kernels = _kernels(graph, inputs, **options)

        def run(args: list[Any]) -> Any:
            for name, num_bytes in kernels:
                counted.add(name, num_bytes)
            counted.is_on = False
            result = Body(graph).run(*args)
            counted.is_on = True
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=compiled)


def _kernels(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool = False,
    is_inference: bool = False,
    **options: Any,
) -> list[tuple[str, int]]:
    """As `compile_fx` goes about a graph, up to its scheduler."""
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
        graph = GraphLowering(
            module, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference
        )
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            sizes = [
                (type(node).__name__, node.get_read_write_buffers_sizes())
                for node in graph.scheduler.nodes
                if "fill_rows_" not in str(getattr(node.node, "op_overload", ""))
            ]
            # Some nodes are views.
            return [(name, num_bytes) for name, num_bytes in sizes if num_bytes]
