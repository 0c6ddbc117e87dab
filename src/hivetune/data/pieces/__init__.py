"""The parts that the readers of formats share: turns, parts of turns, calls, answers of APIs, logs of sessions."""
