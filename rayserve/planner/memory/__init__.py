"""What fits beside the weights, and how sure is that?"""
