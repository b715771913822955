"""The step under way, from the hook that sees a gradient to the combined one in `p.grad`."""
