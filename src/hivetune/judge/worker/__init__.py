"""Loss and greedy answers of base and tuned model."""
