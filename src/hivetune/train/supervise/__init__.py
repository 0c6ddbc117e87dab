"""Starts children, watches them, explains their deaths and gets the run to its end. Never imports torch."""
