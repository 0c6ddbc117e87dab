"""llama.cpp: a server process, the requests to it, and the checks of its answers."""
