"""The loop that continues without people: look at what is there, decide one thing, do it, write both down, look again.

`loop` holds that loop. `decide` (pure) says what comes next; `observe` reads the artefacts that it decides by; `acts`
do it, each by calling a station of the walk. pool, gate, window and notify answer one question each.
"""
