"""Which request holds which KV block, on the device and on the host.

Knows block numbers, hashes and reference counts; leaves the copies to execution.
"""
