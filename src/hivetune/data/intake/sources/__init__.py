"""Where interactions come from; each source is exactly-once and resumable."""
