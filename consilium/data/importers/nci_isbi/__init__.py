"""NCI-ISBI 2013: see README.md."""
