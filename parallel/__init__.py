"""Linear layers, as they lie on the ranks of an engine, and the rules by which ranks keep in step.

Knows tensors and votes; leaves requests and steps to the engine, and processes to transport.
"""
