"""What is loaded, who waits for it, which release answers, and how one release replaces another."""
