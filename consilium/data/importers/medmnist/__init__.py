"""MedMNIST: see README.md."""
