"""Secrets and personal data in rows: rules as data (secrets, keyed, numbers, contact), and how they are applied."""
