"""Models and adapters from one file format into another."""
