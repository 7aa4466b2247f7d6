"""The same FedAvg study in other people's frameworks, one program each; none of them imports consilium."""
