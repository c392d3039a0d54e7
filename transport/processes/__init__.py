"""Processes: started, watched, explained, restarted, stopped. Knows nothing of what they compute."""
