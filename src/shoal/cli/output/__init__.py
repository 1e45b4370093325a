"""What the command line prints: lines, live panel, summary and tables."""
