"""Where data lie: local folders and object stores behind one interface, sets of parts, targets by name. No torch."""
