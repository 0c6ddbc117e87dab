"""What everything stands on: the disk, append-only journals, and hive.db."""
