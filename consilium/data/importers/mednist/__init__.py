"""MedNIST: see README.md."""
