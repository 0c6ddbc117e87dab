"""The foundation: files, append-only journals, and hive.db."""
