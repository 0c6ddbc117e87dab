"""Several machines: Ray places one agent a device, and an agent starts the worker of its machine's own environment."""
