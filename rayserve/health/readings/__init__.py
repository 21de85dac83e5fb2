"""What do the texts say that drivers, kernel and tools print? Text in, facts out; nothing is read."""
