"""The pages of the dashboard, and the forms of what a person can do there."""
