"""What would read rows that nothing reads: the lines that a refusal prints."""
