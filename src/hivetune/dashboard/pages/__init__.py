"""One module for each page of the dashboard, and one for what a person can do there."""
