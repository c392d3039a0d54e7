"""The engine: a scheduler, a paged KV cache and a runner, in one process.

Knows token ids, slots and blocks; leaves text to the frontend.
"""
