"""llama.cpp: a server process, what it is asked, and whether it answers as it should."""
