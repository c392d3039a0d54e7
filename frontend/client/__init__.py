"""Requests in flight between callers and engines.

Knows token ids and the wire's messages; leaves text to the text room.
"""
