"""What can be shown of a GPU kernel without a GPU."""
