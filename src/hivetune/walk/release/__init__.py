"""The stations after the verdict: exports, releases, and what a name stands for when it is talked to."""
