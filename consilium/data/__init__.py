"""A federation on disk: its tables, its images, what is wrong with them, and the arrays that training reads."""
