"""A page that shows a run while it is under way."""
