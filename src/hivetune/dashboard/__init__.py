"""The dashboard: the work that goes on in a home, for people. It only reads run folders and hive.db, without a lock."""
