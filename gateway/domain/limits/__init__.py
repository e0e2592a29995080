"""What a request may use, and what it has used: meters, and the rules of one step on them. Pure."""
