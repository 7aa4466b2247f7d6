"""MSD Task05: see README.md."""
