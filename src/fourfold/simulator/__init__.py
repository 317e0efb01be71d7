"""What happens in one step on every rank of a cluster, in time and memory, and why."""
