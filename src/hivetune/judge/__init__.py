"""Evaluation: base and tuned model on the same rows, with confidence intervals, and the verdict."""
