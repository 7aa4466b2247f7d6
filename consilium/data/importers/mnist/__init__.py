"""MNIST: see README.md."""
