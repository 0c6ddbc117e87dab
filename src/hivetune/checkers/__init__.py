"""Checkers, which decide whether an answer succeeds: by its words, its structure or its code. docs/evaluate.md lists
them."""
