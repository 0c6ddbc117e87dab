"""Answers that somebody or something judged: which of two is better, which failed, and what that can teach."""
