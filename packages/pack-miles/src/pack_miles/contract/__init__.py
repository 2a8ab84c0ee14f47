"""What a run writes down, and how it is read and checked: events, the log, the audit."""
