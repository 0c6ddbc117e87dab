"""The acts: each calls one station of the walk, and may be repeated after a kill at any moment."""
