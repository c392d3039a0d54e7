"""Programs written for vLLM 0.33: its names, signatures and defaults over `LLM` and `AsyncLLM`.

Knows how vLLM calls things; leaves all work to the classes that it wraps.
"""
