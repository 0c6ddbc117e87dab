"""The APIs that clients use: each maps its requests to checked chat fields, and answers to its own form."""
