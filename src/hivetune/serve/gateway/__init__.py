"""The OpenAI API in front of the backends: requests in, answers out, captured, counted and guarded."""
