"""One training loop, and what it needs: data, optimizer, metrics, checks, and the launching of ranks."""
