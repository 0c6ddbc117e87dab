"""Conversations in a row or a file of no known layout: lists of turns, trees of edits, streams of events, texts."""
