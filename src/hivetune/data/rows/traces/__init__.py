"""Traces and evaluation logs: steps of programs around a model, of which those that say what it answered are read."""
