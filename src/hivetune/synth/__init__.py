"""Training rows from the documentation that is on the machine: read as structure, made into questions, and checked."""
