"""A person's own folder: see README.md."""
