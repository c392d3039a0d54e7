"""Tokenizers, chat templates, stop strings, log-probabilities as vLLM shows them.

Knows text and token ids; leaves engines and threads to the client.
"""
