"""CIFAR-10: see README.md."""
