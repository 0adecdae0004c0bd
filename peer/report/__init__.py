"""Views of a run for people, from figures that others measured: live, as tables, as one page."""
