"""Conversations as chat programs export them: one record a conversation, often a tree of edits."""
