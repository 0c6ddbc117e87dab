"""Models without torch: their prepared folders, shapes and families."""
