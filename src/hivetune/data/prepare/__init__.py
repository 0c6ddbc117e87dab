"""From sources to a report and an immutable snapshot."""
