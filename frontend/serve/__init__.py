"""The OpenAI server: processes that listen, the table of routes, probes, and what endpoints share.

Knows its processes, when they let requests in, and when they end; leaves HTTP itself to `http`, the endpoints and their
schema to `api`, the text of prompts and outputs to `client` and `text`, and engines to their supervisor.
"""
