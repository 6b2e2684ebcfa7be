"""Where arrays live and how work is shared: mesh, sharding rules, and the few functions that models call."""
