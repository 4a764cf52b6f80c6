"""What makes a response acceptable, one check a module, each complete in itself: the digest of a check is that of its file."""
