"""PROSTATEx: see README.md."""
