"""From settings to a runner that is warm: loads, measures, sizes the KV cache, refuses with advice.

Gone once serving.
"""
