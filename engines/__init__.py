"""What runs a graph: the rounding interpreter and the sessions of the runtimes, all behind one contract."""
