"""Layers as they lie on ranks, linear ones and experts, and the rules by which ranks keep in step.

Knows tensors and votes; leaves requests and steps to the engine, and processes to transport.
"""
