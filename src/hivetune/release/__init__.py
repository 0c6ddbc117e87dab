"""Release: exports of a trained adapter, the proof that they are what was trained, and the registry."""
