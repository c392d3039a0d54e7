"""Bytes between processes, the processes themselves, and the one exception tree.

Knows messages; leaves their meaning to whoever sends and gets them.
"""
