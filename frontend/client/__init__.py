"""Requests in flight between callers and engines.

Knows token ids and the wire's messages, and leaves text to the text room.
"""
