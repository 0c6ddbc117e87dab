"""Serving: the gateway in front of llama.cpp, its APIs, and the chat in a terminal."""
