"""Several machines: starting Ray on each, and whole runs that are carried to a free device and home again."""
