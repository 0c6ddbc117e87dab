"""Releases: exports of a trained adapter, the proof that an export computes what was trained, and the registry."""
