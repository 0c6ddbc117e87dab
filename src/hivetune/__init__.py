"""Hivetune: train a better local model from interactions that you already have. `hivetune.walk` is its Python API."""

__version__ = "0.1.0"
