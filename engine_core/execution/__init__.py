"""Runs step plans on one device. Knows slots, rows and blocks; leaves requests and their states to scheduling."""
