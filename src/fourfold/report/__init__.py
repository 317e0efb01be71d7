"""Results as people read them. No torch. A file per kind of result, each imported where it is wanted and not before."""
