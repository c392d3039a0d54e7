"""Requests, their states, and the plan of each step. Knows blocks by number; leaves tensors to execution."""
