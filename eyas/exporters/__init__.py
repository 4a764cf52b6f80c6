"""What a trainer reads: one module per file format."""
