"""The only package that starts tasks: it drives jobs through inference, tools, validation and delivery."""
