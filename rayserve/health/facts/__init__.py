"""What is there? Reads a host, each question under a time limit; judges nothing."""
