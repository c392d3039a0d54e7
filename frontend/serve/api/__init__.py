"""The endpoints: their schema, and what each makes of a request and of its outputs.

Knows OpenAI's and vLLM's forms of requests and answers; leaves sockets, access and the writing of streams to the room
around it.
"""
