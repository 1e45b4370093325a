"""Starting runs and finding them again, for the command line and for `shoal.run` alike."""
