"""Is this machine ready? `facts` reads it, `checks` judges what was read."""
