"""Interactions in, trusted token rows out: read, check, redact, dedupe, split, render, snapshot. No torch."""
