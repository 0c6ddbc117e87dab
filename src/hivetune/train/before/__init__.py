"""The stations before a run: settings for rows, the plan of a config, measured choices, variables of a worker."""
