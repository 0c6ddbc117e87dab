"""The preparation of rows: from sources to a report and an immutable snapshot."""
