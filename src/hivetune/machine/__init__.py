"""What this machine is and can do, and the facts that are known about machines."""
