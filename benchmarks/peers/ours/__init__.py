"""Our side: the stages' own code on the given work."""
