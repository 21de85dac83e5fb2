"""What does each rank hold of the weights, to the byte?"""
