"""Messages as bytes and back, and exactly-once delivery.

Knows fields and frames, and is pure: leaves sockets, threads and clocks to io.
"""
