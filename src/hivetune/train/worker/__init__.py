"""The training loop and what it needs: an open run, its batches, its optimizer, its checkpoints."""
