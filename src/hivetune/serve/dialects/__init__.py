"""The APIs that clients speak: each maps its requests to checked chat fields, and the one answer to its own form."""
