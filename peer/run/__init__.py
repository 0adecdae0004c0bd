"""A run as its configuration determines it: the plan, what the peers are set up from, and the summary at the end."""
