"""What is known of a model without torch: its prepared folder, its shapes, its families."""
