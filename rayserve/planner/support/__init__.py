"""What can a chip, a cut or a file not do?"""
