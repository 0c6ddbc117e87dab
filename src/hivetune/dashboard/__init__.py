"""The dashboard: what goes on in a home, for people. It reads run folders and hive.db only, without a lock."""
