"""What protects a federation from its members, and members from the federation."""
