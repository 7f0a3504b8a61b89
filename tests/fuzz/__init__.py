"""Calls that no client of ours would make."""
