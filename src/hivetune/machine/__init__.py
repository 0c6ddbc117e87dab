"""This machine, its measured profile, and the known facts about machines."""
