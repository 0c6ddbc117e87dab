"""The stations in the order in which an interaction passes them, one file each: it calls one room and prints nothing.

fetch, prepare, open (identity), probe, train, evaluate, verdict, export, register; docs/design.md draws the whole.
"""
