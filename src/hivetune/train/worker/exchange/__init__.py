"""The ranks of a run: how they start, what they agree on, and one sum of integers a step."""
