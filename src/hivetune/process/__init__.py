"""Processes: their start, limits, stop and detachment, and the contract of parent and child."""
