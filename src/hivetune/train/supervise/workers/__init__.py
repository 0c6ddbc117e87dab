"""Workers beside a run's own: processes of this machine, or of a cluster's; nobody outside asks which."""
