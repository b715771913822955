"""The domain weights: everything that is K x K, and nothing of the size of the model."""
