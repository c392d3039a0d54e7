"""The engine's loop and its process: admits requests, steps, recovers, answers questions.

Leaves planning to scheduling.
"""
