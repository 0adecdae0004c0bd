"""The configuration: its options, the schema that editors read, and the writer of its file."""
