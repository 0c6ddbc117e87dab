"""Hivetune fine-tunes a local language model with LoRA on chats and agent logs. `hivetune.walk` is its Python API."""

__version__ = "0.1.0"
