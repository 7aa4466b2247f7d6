"""A real federation on NVIDIA FLARE: kits, the server, the sites, and the office that submits studies."""
