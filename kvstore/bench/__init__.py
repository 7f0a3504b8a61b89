"""Honest instruments: every row is a ratio against a strong baseline, both measured in turn in one run."""
