"""Four plugins of Eyas, a module each."""
