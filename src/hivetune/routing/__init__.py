"""Which domain gets an adapter of its own, which request finds it, how long it lives. Pure, standard library only."""
