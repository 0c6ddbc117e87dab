"""Facts as data: chips, builds of torch, conditions, variables (*.toml); cards, models, codes, faults (*.yaml)."""
