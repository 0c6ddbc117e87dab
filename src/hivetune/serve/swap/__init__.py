"""What is loaded, who waits for it, which release answers, and how one takes the place of another."""
