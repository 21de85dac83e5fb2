"""What do the facts of a host mean? Facts in, verdicts out; nothing is read here."""
