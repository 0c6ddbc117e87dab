"""More than one device: whole runs in parallel."""
