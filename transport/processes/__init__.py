"""Processes: started, watched, explained, restarted, stopped.

Knows their pids, pipes and progress; leaves what they compute to the module that they run.
"""
