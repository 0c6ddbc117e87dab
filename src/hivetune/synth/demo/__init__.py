"""The demo: its interactions, its config, and a few questions at the end."""
