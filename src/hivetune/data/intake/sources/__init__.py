"""The sources of interactions; each is read exactly once and can be resumed."""
