"""Tokenizers, chat templates, stop strings, log-probabilities as vLLM shows them.

Knows text and token ids; leaves engines, threads and the text of a running request (`choice.py`) to
the client.
"""
