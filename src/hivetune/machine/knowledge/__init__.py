"""Facts as data: machines and faults (*.toml), cards and models (*.yaml)."""
