"""Text: tokenizers, chat templates, stop strings, log-probabilities as vLLM shows them.

Knows no engine and no thread.
"""
