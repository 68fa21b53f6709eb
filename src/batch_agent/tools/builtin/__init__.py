"""The built-in tools. Each module has a function that takes settings and returns the tool."""
