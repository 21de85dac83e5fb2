"""How long do a first and a following token take?"""
