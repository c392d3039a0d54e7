"""Requests, their states, and the plan of each step. Knows blocks by number and leaves tensors to execution."""
