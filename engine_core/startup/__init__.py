"""From settings to a warm runner: loads, measures, sizes the KV cache, refuses with advice.

Knows bytes and settings, and is done once the engine serves; leaves the steps to execution.
"""
