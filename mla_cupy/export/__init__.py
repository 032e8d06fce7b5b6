"""Export of operations as C sources: what the package does about a call, recorded, for programs without Python."""
