"""Model families, their files and weights, and the one decoder.

Knows tensors and files; leaves slots and steps to execution.
"""
