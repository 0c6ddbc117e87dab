"""Two of anything on the same held-out prompts: sides are opened, asked and timed; what they said is kept."""
