"""What a plan says of itself: sections of an explanation, bounds, cost, JSON, recipes."""
