"""A run as its configuration determines it: the plan, the objects of its peers, and the summary at the end."""
