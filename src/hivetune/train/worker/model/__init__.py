"""A frozen base with low-rank adapters: the fast path, the general path, and how one is chosen."""
