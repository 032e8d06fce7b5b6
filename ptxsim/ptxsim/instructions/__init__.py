"""Instructions: one file for each class, which registers its emitters."""
