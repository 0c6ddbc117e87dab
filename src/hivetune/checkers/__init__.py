"""Did this answer succeed? Named checkers: of words, of structure, of code. docs/evaluate.md lists them."""
