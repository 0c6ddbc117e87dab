"""Secrets and personal data in rows: the rules (secrets, personal), and how they are applied."""
