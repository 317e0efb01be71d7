"""Where tokens come from: token files, tokenizers, and the endless mixed streams that training reads. No torch."""
