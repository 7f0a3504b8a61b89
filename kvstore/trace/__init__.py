"""Request traces: reading them, and running them through the store's own core on a virtual clock."""
