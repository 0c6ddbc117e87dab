"""The supervisor: it starts workers, watches them, explains their deaths and gets the run to its end, without torch."""
