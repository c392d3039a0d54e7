"""Linear layers, as they lie on the ranks of an engine. Knows tensors; leaves requests and steps to the engine."""
