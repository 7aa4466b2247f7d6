"""A method as another package may have one. It says so when it is imported."""

from consilium.methods.fedavg import FedAvg

IMPORTED = "a class that a study names was imported"
print(IMPORTED, flush=True)


class Method(FedAvg):
    """FedAvg under a name of its own."""
