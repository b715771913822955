"""The paper's experiments: which runs each needs, in which order, and which table they end in."""
