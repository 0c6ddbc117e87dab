"""Conversations in rows of no known layout, found by their structure."""
