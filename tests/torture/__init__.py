"""Torture: real processes over a real daemon that are stopped, killed and restarted by a seeded plan."""
