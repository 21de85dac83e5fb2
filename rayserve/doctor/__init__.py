"""Why did it fail? `collect` reads logs line by line, `diagnosis` finds the first cause in them."""
