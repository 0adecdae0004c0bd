"""What people see of a run: live, as tables, as one page. Reads figures that others measured; measures nothing."""
