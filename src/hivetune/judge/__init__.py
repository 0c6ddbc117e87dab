"""Base against tuned, paired, with intervals; and the verdict."""
