"""The dashboard: what continues in a home, for people. It reads run folders and hive.db only, without a lock."""
