"""Requests in flight between callers and engines.

Knows requests, mailboxes and the wire's messages; leaves how ids become text and back to the text room.
"""
