"""Logs in which one conversation takes many lines: sessions of coding agents, and what servers print."""
