"""What each action does: it calls one station of the walk, and may be done again after a kill at any moment."""
