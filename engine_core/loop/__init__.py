"""The engine's loop and its process: takes requests in, steps, recovers, answers questions.

Knows when things happen; leaves the plan to scheduling and the device to the runner.
"""
