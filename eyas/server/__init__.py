"""The server: the lease that starts it on demand and shares it, and the supervisor that keeps and stops it."""
