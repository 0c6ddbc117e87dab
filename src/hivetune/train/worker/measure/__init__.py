"""What is measured before a run: rates, correct backends, agreement with transformers."""
