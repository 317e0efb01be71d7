"""GPUs and clusters: peaks, memory and bandwidths, each with its source."""
