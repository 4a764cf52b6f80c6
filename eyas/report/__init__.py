"""What people look at: numbers in words, tables for the terminal, and the page."""
