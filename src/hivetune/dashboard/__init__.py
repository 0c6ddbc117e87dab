"""What goes on in a home, for people: read from run folders and hive.db alone, without a lock."""
