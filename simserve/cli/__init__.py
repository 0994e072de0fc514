"""The command line: one thin module a command; parses options, calls the floors below, prints."""
