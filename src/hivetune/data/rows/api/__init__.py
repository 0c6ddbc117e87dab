"""What the APIs of models were asked and what they sent: pieces of streams, recordings, what servers print."""
