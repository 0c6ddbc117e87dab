"""Hivetune: from the interactions you already have to a better local model. See docs/design.md for the walk."""

__version__ = "0.1.0"
