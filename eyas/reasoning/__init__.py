"""How a model marks its reasoning, one format a module. What the Split of a format means is in eyas.plugins."""
