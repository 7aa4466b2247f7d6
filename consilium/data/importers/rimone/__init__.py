"""RIM-ONE: see README.md."""
