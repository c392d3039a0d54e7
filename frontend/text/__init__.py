"""Tokenizers, chat templates, stop strings, log-probabilities as vLLM shows them.

Knows text and token ids, and the processes in which chat templates render; leaves engines, threads and the text of a
running request (`choice.py`) to the client.
"""
