"""What callers use: Python classes and commands.

Knows text, prompts and requests; leaves blocks and the GPU to the engine.
"""
