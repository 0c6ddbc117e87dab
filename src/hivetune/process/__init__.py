"""Everything that starts, limits, stops or detaches a process, and the contract of parent and child."""
