"""Two stages of training, and the comparison that says whether the second one helped."""
