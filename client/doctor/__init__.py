"""What can be wrong with an installation, found out and said in words. Only packages.py needs more than Python."""
