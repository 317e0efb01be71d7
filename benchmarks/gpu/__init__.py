"""What only a GPU can tell, in one call of ``benchmarks/gpu.sh``; ``docs/measured.md`` says what it prints."""
