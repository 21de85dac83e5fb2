"""What runs inside a replica: the Serve deployment, the HTTP door in front of it, and warm-up."""
