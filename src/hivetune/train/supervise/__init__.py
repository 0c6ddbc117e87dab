"""The supervisor: it starts workers, watches them, diagnoses their deaths, and gets a run to its end, without torch."""
