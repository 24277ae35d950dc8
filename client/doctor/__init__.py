"""What can be wrong with an installation, found out and said in words."""
