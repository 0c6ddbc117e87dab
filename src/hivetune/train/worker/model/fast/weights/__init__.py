"""A model's matrices, merged: what they are, how they are read, where their adapters lie."""
