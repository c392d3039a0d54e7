"""HTTP at the edge: requests within limits, who may enter, errors as answers, and the writing of streams.

Knows bytes, headers and the event loop; leaves what an endpoint makes of a request and of its outputs to `api`, and
processes and their sockets to the room around it.
"""
