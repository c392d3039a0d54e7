"""Sockets and the threads that own them, on both sides.

Knows messages; leaves their meaning to whoever gives the queue.
"""
