"""Which of a family's adapters answers a request: the shared one, or the expert of its domain."""
